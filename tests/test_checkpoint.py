"""What a MODEL argument means: each kind resolves to one thing, and every mistake is one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

import capszoo
from capszoo._pretrained.catalogue import check_model_argument, checkpoints
from capszoo._pretrained.files import HUB_FILENAME, METADATA_FILENAME, locate_weights
from capszoo._pretrained.info import run_weights
from capszoo.checkpoint import NoWeights, checkpoint_of, resolve
from capszoo.cli.predict import _sha256
from capszoo.errors import CapszooError, WeightsError
from capszoo.metadata import Metadata
from capszoo.summary import summarise
from tests.support.errors import refuses

NAME = "resnet20_routingcaps.mnist"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "run"
    folder.mkdir()
    weights = locate_weights(checkpoints(aliases=False)[NAME])
    shutil.copy(weights, folder)
    shutil.copy(weights.parent.parent / "weights" / f"{NAME}.json", folder)
    return folder


@pytest.fixture
def hub_layout(run: Path, tmp_path: Path) -> Path:
    """A folder as the Hub holds it."""
    folder = tmp_path / "layout"
    folder.mkdir()
    info = checkpoints(aliases=False)[NAME]
    shutil.copy(run / f"{NAME}.safetensors", folder / HUB_FILENAME)
    shutil.copy(run / f"{NAME}.json", folder / METADATA_FILENAME)
    config = {
        "architecture": info.architecture,
        "num_classes": info.num_classes,
        "model_args": {},
        "sha256": info.sha256,
        "pretrained_cfg": {"input_size": info.input_size, "mean": info.mean, "std": info.std},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scores(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model(torch.randn(2, 1, 28, 28, generator=generator))


def test_every_kind_gives_the_same_model(run: Path, hub_layout: Path) -> None:
    expected = scores(capszoo.create_model(NAME, pretrained=True).eval())
    kinds = {
        NAME: "name",
        str(run): "file",
        str(run / f"{NAME}.safetensors"): "file",
        str(run / f"{NAME}.json"): "file",
        str(hub_layout): "folder",
        f"local-dir:{hub_layout}": "folder",
    }
    for argument, kind in kinds.items():
        found = resolve(argument)
        assert found.kind == kind and found.argument == argument
        assert found.metadata().metrics["test"].n == 10_000, argument
        model = found.create(device="cpu")
        assert not model.training
        assert torch.equal(scores(model), expected), argument
        same = found.same_in_zoo()
        assert same is not None and same.name == NAME


def test_nothing_is_loaded_by_resolving(run: Path) -> None:
    (run / f"{NAME}.safetensors").write_bytes(b"damaged")
    found = resolve(run)
    assert found.info is not None and found.info.name == NAME
    with pytest.raises(WeightsError, match="sha256"):
        found.weights()
    with pytest.raises(WeightsError, match="sha256"):
        found.create(device="cpu")


def test_a_name_of_the_zoo_wins_over_a_folder_of_that_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rename(tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert resolve(NAME).kind == "name"
    assert resolve(f"./{NAME}").kind == "file"


def test_an_architecture_stands_for_its_default_weights(run: Path) -> None:
    architecture = NAME.partition(".")[0]
    found = resolve(architecture)
    created = checkpoint_of(found.create(device="cpu"))
    assert found.info is not None and created is not None and created.info == found.info
    fresh = found.create(pretrained=False, device="cpu")
    assert checkpoint_of(fresh) is None


def test_ray_s_answers_belong_to_weights(tmp_path: Path) -> None:
    """The key of ``predict --ray`` has the weights' sha256, also where only the file tells it."""
    info = checkpoints(aliases=False)["resnet20_routingcaps.mnist"]
    assert _sha256(resolve("resnet20_routingcaps")) == info.sha256
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = capszoo.create_model("resnet20_routingcaps", num_classes=3)
        save_for_hf(net, str(tmp_path / "mine"), safe_serialization=True)
        found.append(_sha256(resolve(f"local-dir:{tmp_path / 'mine'}")))
    assert all(found) and found[0] != found[1]


IMPLIED = ("resnet20_routingcaps.mnist_uniform", "efficient_capsnet.multimnist")
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in capszoo.list_pretrained() if name not in IMPLIED
]


@pytest.mark.parametrize("name", [*IMPLIED, *OTHERS])
def test_a_saved_checkpoint_is_the_same_network(name: str, tmp_path: Path) -> None:
    """Also the arguments that its tag implies: without them it would be another network."""
    net = capszoo.create_model(name, pretrained=True).eval()
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    x = torch.rand(2, *net.pretrained_cfg["input_size"])
    for create in (capszoo.create_model, timm.create_model):
        again = create(f"local-dir:{tmp_path}", pretrained=True).eval()
        with torch.no_grad():
            assert torch.equal(again(x), net(x))


@pytest.mark.parametrize(
    ("argument", "error", "text"),
    [
        ("no/such/folder", CapszooError, ("folder", "check")),
        ("someone/model-1.0", CapszooError, "hf-hub:someone/model-1.0"),
        ("local-dir:nowhere", CapszooError, ("folder", "file")),
        ("nowhere.safetensors", WeightsError, "file"),
        (".", CapszooError, ("weights", "metadata")),
        ("https://huggingface.co/me/digits", CapszooError, "hf-hub:me/digits"),
        ("http://example.org/x.onnx", CapszooError, "http://example.org/x.onnx"),
        ("gone.onnx", CapszooError, "gone.onnx"),
    ],
)
def test_what_is_not_there_is_one_line(
    argument: str, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(error, names=text) as found:
        resolve(argument)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["own.pth", "model_best.pth.tar", "own.pt", "own.bin", "own.safetensors"])
def test_weights_without_metadata_say_how_they_become_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of Python in the message are run, and the folder that they write is evaluated as a model."""
    monkeypatch.chdir(tmp_path)
    net = capszoo.create_model("resnet20_routingcaps", num_classes=3, in_chans=1, img_size=28).eval()
    if name.endswith(".safetensors"):
        save_file(net.state_dict(), name)
    else:  # as timm's train.py writes it
        torch.save({"state_dict": net.state_dict(), "arch": "resnet20_routingcaps", "epoch": 3}, name)
    for read in (resolve, check_model_argument):
        if name.endswith(".safetensors") and read is check_model_argument:
            continue  # only the name is checked before torch is loaded
        with pytest.raises((CapszooError, WeightsError)) as found:
            read(name)
        lines = re.findall(r"`([^`]*)`", str(found.value))
        assert len(lines) == 2 and name in lines[0]
    given = "'resnet20_routingcaps', num_classes=3, in_chans=1, img_size=28"
    code = "\n".join(lines).replace("NAME", given).replace("FOLDER", "'saved'")
    exec(f"import capszoo, timm\n{code}", {})
    again = resolve("saved").create(device="cpu")
    x = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(again(x), net(x))


def test_names_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in capszoo.list_models() if name != "caps_head"]  # has no recipe
    untrained = next(name for name in names if not capszoo.list_pretrained(f"{name}.*"))
    assert resolve(untrained).info is None and resolve(untrained).metadata() == Metadata()
    with refuses(NoWeights, names=[untrained]):
        resolve(untrained).create()
    with refuses(WeightsError, names=["weights", "file"]):
        resolve(untrained).weights()
    with pytest.raises(capszoo.UnknownModel):
        resolve("resnet20_routingcap").create()


def test_metadata_are_typed_and_keep_what_they_do_not_know() -> None:
    values = {"seed": 3, "later": {"x": 1}, "recipe": {"epochs": 2, "data": {"name": "mnist", "new": 5}}}
    found = Metadata.read(values, "here")
    assert found.seed == 3 and found.trained.data.name == "mnist" and found.dataset.name == ""
    assert found.model_dump(exclude_unset=True) == values
    with refuses(CapszooError, names=["metrics.test.n"]):
        Metadata.read({"metrics": {"test": {"n": "many"}}}, "here")


@pytest.mark.parametrize("name", sorted(checkpoints(aliases=False)))
def test_metadata_of_the_zoo(name: str) -> None:
    stated, raw = checkpoints(aliases=False)[name].metadata, checkpoints(aliases=False)[name].raw
    test = stated.metrics["test"]
    assert test.n and test.top1 == raw["metrics"]["test"]["top1"]
    assert stated.trained.epochs == raw["recipe"]["epochs"] and stated.dataset.sha256
    assert json.dumps(stated.history) == json.dumps(raw.get("history", {})), "numbers stay of their type"


def test_timm_s_weights_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no connection\nmore about it")

    monkeypatch.setattr("capszoo.checkpoint.create_model", offline)
    with refuses(CapszooError, names=["resnet18"]):
        resolve("resnet18").create()


@pytest.mark.parametrize("routing, papers", [("idpa", True), ("em", False)])
def test_a_saved_head_names_its_own_paper(routing: str, papers: bool, tmp_path: Path) -> None:
    net = capszoo.create_model("caps_head", backbone="resnet10t", routing=routing, num_classes=3)
    assert bool(net.pretrained_cfg["paper_ids"]) == bool(net.pretrained_cfg["paper_name"]) == papers
    save_for_hf(net, str(tmp_path), safe_serialization=True)
    assert bool(summarise(f"local-dir:{tmp_path}").info.paper_ids) == papers


def test_a_path_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with refuses(capszoo.UnknownModel, names=["capszoo.load"]):
        capszoo.create_model(str(tmp_path / "run"))
    (tmp_path / "run" / "config.json").write_text("{}")
    with refuses(capszoo.UnknownModel, names=["path", "local-dir"]):
        capszoo.create_model(str(tmp_path / "run"))
    with refuses(capszoo.UnknownModel, names=["looks", "Hugging"]):
        capszoo.create_model("me/digits")


def test_a_wrong_argument_is_not_blamed_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("img_size=(4, 4) is too small")

    monkeypatch.setattr("capszoo.checkpoint.create_model", refuse)
    with refuses(ValueError, names=["me/digits", "img_size", "4"]):
        resolve("hf-hub:me/digits").create(img_size=4)


def test_offline_metadata_that_exist_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them fine-tuning would take another loss than the weights were trained with."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    from capszoo import checkpoint

    def offline(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no connection")

    known: list[object] = [None]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: known[0])
    monkeypatch.setattr(checkpoint, "hub_config", lambda _: SimpleNamespace(model_args={"depth": 8}))
    with refuses(WeightsError, names=["metadata.json"]):
        checkpoint._hub_metadata("me/pets")
    known[0] = object()  # the cache knows that the repository has no such file
    assert checkpoint._hub_metadata("me/pets") == {"model_args": {"depth": 8}}


def test_hidden_files_are_no_weights_of_a_run(tmp_path: Path) -> None:
    for name in ("a.b", "._a.b"):  # macOS writes the second on foreign file systems
        for suffix in (".safetensors", ".json"):
            (tmp_path / f"{name}{suffix}").write_bytes(b"")
    assert run_weights(tmp_path) == tmp_path / "a.b.safetensors"
