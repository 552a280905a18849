"""Models of strangers: their files describe a model; they run no code, and name no other file, address or size."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save, save_file

import capszoo
from capszoo._pretrained import info as _info
from capszoo._pretrained.catalogue import checkpoints, weights_entry
from capszoo._pretrained.checks import ModelConfig, described
from capszoo._pretrained.files import load_safetensors
from capszoo._pretrained.info import WeightsInfo
from capszoo.errors import WeightsError
from capszoo.inference import load_model
from capszoo.scores import score_kind
from capszoo.summary import summarise
from tests.support.errors import refuses

#: The oldest libraries that pyproject.toml allows.
OLDEST = ("timm==1.0.26", "huggingface_hub==0.30.0")


def _fly(root: Path, home: Path, quick: bool, path: Path | None = None) -> list[dict[str, Any]]:
    """Run the canary, with the libraries of `path` before the installed ones; what it says, one entry a case."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    search = [str(part) for part in (path, root) if part is not None]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.canary", str(home), *(["quick"] if quick else [])],
        cwd=root,
        env={**kept, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _nothing_happened(found: list[dict[str, Any]]) -> None:
    control, *cases = found
    assert control["case"] == "control" and control["ran"] and control["opened"], (
        "else nothing would be noticed"
    )
    ours = [case for case in cases if case["case"].startswith("capszoo,") and case["case"].endswith("hf-hub")]
    assert ours and all(case["asked"] for case in ours), "the stand-in Hub was not asked"
    assert [case for case in cases if case["ran"]] == [], "code of a stranger was run"
    assert [case for case in cases if case["opened"]] == [], "torch.load was called"
    assert [case for case in cases if case["fetched"]] == [], "other files were fetched"
    assert [case for case in cases if case["loaded"]] == [], "a model came of it"
    raw = [
        case for case in cases if not case["case"].startswith("timm") and "WeightsError" not in case["error"]
    ]
    assert raw == []


def test_no_pickle_is_run_opened_or_fetched(root: Path, tmp_path: Path) -> None:
    cases = _fly(root, tmp_path, quick=True)
    assert len(cases) > 150
    _nothing_happened(cases)


@pytest.mark.slow
@pytest.mark.parametrize("libraries", [(), OLDEST], ids=["installed", "oldest"])
def test_no_pickle_with_any_libraries(root: Path, tmp_path: Path, libraries: tuple[str, ...]) -> None:
    """The oldest ones are installed over the environment, into a folder of their own."""
    over = None
    if libraries:
        over = tmp_path / "over"
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(over)]
        needed = ("requests", "urllib3", "idna", "charset_normalizer", "certifi")  # of the older Hub client
        done = subprocess.run([*install, *libraries, *needed], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot fetch {', '.join(libraries)}: {done.stderr.strip().splitlines()[-1]}")
        version = (
            "import timm, huggingface_hub as h; print(*(f'{m.__name__}=={m.__version__}' for m in (timm, h)))"
        )
        asked = [sys.executable, "-c", version]
        shown = subprocess.run(
            asked, env={**os.environ, "PYTHONPATH": str(over)}, capture_output=True, text=True
        )
        assert shown.stdout.split() == list(libraries)
    home = tmp_path / "home"
    home.mkdir()
    cases = _fly(root, home, quick=False, path=over)
    assert len(cases) > 800
    _nothing_happened(cases)


def test_the_oldest_timm_that_does_not_unpickle_is_required(root: Path) -> None:
    stated = (root / "pyproject.toml").read_text()
    for library in OLDEST:
        assert f'"{library.replace("==", ">=").replace("_", "-").removesuffix(".0")}"' in stated


# -- metadata beside weights ---------------------------------------------------------------------------------


def _pair(folder: Path, state: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Weights of a small network and their metadata; `changes` are of the metadata, `...` takes a key out."""
    if state is None:
        state = capszoo.create_model("idpa_cnn", num_classes=3, in_chans=1, img_size=28).state_dict()
    path = folder / "net.safetensors"
    save_file(state, path)
    info: dict[str, Any] = dict(architecture="idpa_cnn", tag="x", num_classes=3, input_size=[1, 28, 28])
    info |= dict(mean=[0.5], std=[0.5], sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **changes)
    path.with_suffix(".json").write_text(json.dumps({k: v for k, v in info.items() if v is not ...}))
    return path


def test_a_sound_pair_loads(tmp_path: Path) -> None:
    path = _pair(tmp_path, label_names=["a", "b", "c"], crop_pct=0.9)
    model = load_model(str(path), device="cpu")
    for key, value in load_safetensors(path).items():
        assert torch.equal(model.state_dict()[key], value)
    assert model.pretrained_cfg["file"] == str(path) and model.pretrained_cfg["crop_pct"] == 0.9
    assert "state_dict" not in model.pretrained_cfg
    assert load_model(str(path), device="cpu", num_classes=5).num_classes == 5


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("architecture", "local-dir:/elsewhere", "architecture"),
        ("architecture", "no_such_net", "no_such_net"),
        ("num_classes", True, "num_classes"),
        ("num_classes", 10**9, "num_classes"),
        ("input_size", [1, 28], "input_size"),
        ("input_size", [1, 10**6, 10**6], "1000000x1000000"),
        ("mean", [float("nan")], "mean.0"),
        ("std", [0.0], "std.0"),
        ("std", [], "std"),
        ("crop_pct", 1e-300, "crop_pct"),
        ("tag", "../x", "tag"),
        ("label_names", {"a": 1}, "label_names"),
        ("recipe", {"loss": "margin"}, "recipe.loss"),
        ("metrics", {"test": {"top1": "x"}}, "metrics.test.top1"),
        ("num_params", "x", "num_params"),
        ("score_kind", ["lengths"], "score_kind"),
        ("background", "green", "background"),
        ("object_size", [0, 28], "object_size.0"),
        ("object_size", [28, 16_000], "28x16000"),
        ("model_args", [1], "model_args"),
        ("model_args", {"checkpoint_path": "x"}, "checkpoint_path"),
        ("model_args", {"fc_caps": [10**12]}, "model_args.fc_caps"),
        ("model_args", {"fc_caps": float("nan")}, "model_args.fc_caps"),
        ("model_args", {"fc_caps": "hf-hub:a/b"}, "model_args.fc_caps"),
        ("model_args", {"img_size": 10**5}, "img_size"),
        ("model_args", {"in_chans": 0}, "in_chans"),
        ("model_args", {"no_such": 1}, "arguments"),
        ("model_args", {"backbone": 3}, "arguments"),
        ("model_args", {"backbone": "local-dir:/elsewhere"}, "model_args.backbone"),
    ],
)
def test_metadata_that_make_no_sense(tmp_path: Path, key: str, value: Any, named: str) -> None:
    path = _pair(tmp_path)
    info = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**info, key: value}))
    with refuses(WeightsError, names=[named]) as caught:
        load_model(str(path), device="cpu")
    assert "net." in str(caught.value)
    with pytest.raises(WeightsError):
        summarise(str(path))


@pytest.mark.parametrize(
    "sections",
    [
        dict.fromkeys(("recipe", "dataset", "metrics", "history", "versions", "per_class", "score_kind")),
        {"recipe": {"loss": None}, "metrics": {"test": None}, "object_size": None},
    ],
)
def test_null_is_absent(tmp_path: Path, sections: dict[str, Any]) -> None:
    path = _pair(tmp_path, **sections)
    assert score_kind(load_model(str(path), device="cpu")) == "logits"
    info = WeightsInfo.from_json(path.with_suffix(".json"))
    assert info.metadata.metrics == {} and info.metadata.trained.loss is None
    assert weights_entry(info)["top1"] is None and weights_entry(info)["score_kind"] == ""


@pytest.mark.parametrize(
    "content", ["", "\n", "null", "5", "[]", '"x"', "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_metadata_that_are_no_object(tmp_path: Path, content: str) -> None:
    path = _pair(tmp_path)
    path.with_suffix(".json").write_text(content)
    with refuses(WeightsError, names=["net.json", "JSON"]):
        load_model(str(path), device="cpu")
    path.with_suffix(".json").write_bytes(b'{"architecture": "\xff\xfe"}')
    with refuses(WeightsError, names=["JSON", "readable"]):
        load_model(str(path), device="cpu")
    (tmp_path / "config.json").write_text(content)
    with refuses(WeightsError, names=["config.json", "JSON"]):
        load_model(f"local-dir:{tmp_path}", device="cpu")


def test_metadata_that_ask_for_terabytes(tmp_path: Path) -> None:
    """The file holds a small network; the sizes are allowed each for itself."""
    for changes in (
        dict(num_classes=1_000_000),
        dict(model_args={"backbone_chans": 100_000}),
    ):
        path = _pair(tmp_path)
        info = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps({**info, **changes}))
        start = time.monotonic()
        with refuses(WeightsError, names=["metadata", "describe"]):
            load_model(str(path), device="cpu")
        assert time.monotonic() - start < 5
        config = dict(architecture="idpa_cnn", model_args=changes.get("model_args", {}))
        config["pretrained_cfg"] = dict(num_classes=changes.get("num_classes", 3), input_size=[1, 28, 28])
        (tmp_path / "config.json").write_text(json.dumps(config))
        path.rename(tmp_path / "model.safetensors")
        for create in (capszoo.create_model, __import__("timm").create_model):
            with refuses(WeightsError, names=["metadata", "describe"]):
                create(f"local-dir:{tmp_path}", pretrained=True)


def test_a_folder_whose_weights_are_not_those_it_states(tmp_path: Path) -> None:
    _pair(tmp_path).rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "idpa_cnn", "sha256": "0" * 64}))
    with refuses(WeightsError, names=["model.safetensors", "config.json", "sha256"]):
        capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_metadata_that_ask_for_a_million_modules(tmp_path: Path) -> None:
    """On the meta device parameters take no memory, but modules do."""
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = {"architecture": "resnet18", "num_classes": 2, "model_args": {"layers": [900_000, 1, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.monotonic()
    with refuses(WeightsError, names=["10,020", "describe", "modules"]):
        capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert time.monotonic() - start < 60


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    state = capszoo.create_model("idpa_cnn", num_classes=3, in_chans=1, img_size=28).state_dict()
    name = "stages.stem.conv.weight"
    for value in (float("nan"), float("inf")):
        broken = {**state, name: state[name].clone()}
        broken[name].view(-1)[7] = value
        with refuses(WeightsError, names=[name, "NaN", "tensor", "infinity"]):
            load_model(str(_pair(tmp_path, broken)), device="cpu")
    with refuses(WeightsError, names=[name, "torch.int64", "torch.float32", "tensor", "model"]):
        load_model(str(_pair(tmp_path, {**state, name: state[name].long()})), device="cpu")
    (tmp_path / "empty.safetensors").write_bytes(save({}))
    with refuses(WeightsError, names=["holds", "tensors"]):
        load_safetensors(tmp_path / "empty.safetensors")


def test_timms_own_architectures_say_in_one_line_what_does_not_fit(tmp_path: Path) -> None:
    path = _pair(tmp_path, {"a": torch.zeros(3)}, architecture="test_resnet")
    with refuses(WeightsError, names=["weights", "described"]):
        load_model(str(path), device="cpu")


def test_timms_own_architectures_may_have_any_number_of_channels(tmp_path: Path) -> None:
    """Older versions of timm adapt a first convolution from three channels alone: from others it would be new."""
    args = dict(num_classes=3, in_chans=2)
    state = timm.create_model("test_resnet", **args).state_dict()
    pair = _pair(tmp_path, state, architecture="test_resnet", input_size=[2, 64, 64])
    pair.rename(tmp_path / "model.safetensors")
    config = {"architecture": "test_resnet", "num_classes": 3, "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = [capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True)]
    (tmp_path / "model.safetensors").rename(pair)
    loaded.append(load_model(str(pair), device="cpu"))
    for model in loaded:
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


# -- config.json ---------------------------------------------------------------------------------------------


def test_a_configuration_describes_and_names_no_source(tmp_path: Path) -> None:
    stated = dict(
        architecture="idpa_cnn",
        num_classes=3,
        label_names=["a", "b", "c"],
        model_args={"img_size": 28, "in_chans": 1},
        pretrained_cfg=dict(
            url="http://x/y", file="/etc/passwd", hf_hub_id="a/b", hf_hub_filename="c", source="x"
        )
        | dict(
            state_dict={"a": 1}, custom_load=True, mean=[0.1], std=[0.2], crop_mode="center", unheard_of=3
        ),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stated))
    config = ModelConfig.read(path)
    assert config.cfg.keys() == {
        *("architecture", "num_classes", "label_names", "mean", "std", "crop_mode", "input_size")
    }
    assert config.cfg["input_size"] == (1, 28, 28)
    model = capszoo.create_model(f"local-dir:{tmp_path}")
    assert not {"url", "file", "hf_hub_id", "hf_hub_filename", "state_dict"} & model.pretrained_cfg.keys()
    assert model.pretrained_cfg["mean"] == (0.1,) and model.num_classes == 3
    assert model.pretrained_cfg["first_conv"] == "stages.stem.conv", "what the network is, its code says"


def test_a_configuration_without_a_size_has_the_architecture_s(tmp_path: Path) -> None:
    stated = {"architecture": "resnet20_routingpool", "num_classes": 10, "model_args": {"in_chans": 1}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    model = capszoo.create_model(f"local-dir:{tmp_path}")
    assert (model.in_chans, model.img_size) == (1, (32, 32))


def test_configurations_of_timm_are_accepted() -> None:
    """All of them, as timm writes them; VOLO's share of the crop is above 1."""
    for name in timm.list_pretrained():
        written = json.loads(json.dumps(timm.get_pretrained_cfg(name).to_dict(remove_source=True)))
        assert 0 < described(written, name).get("crop_pct", 1.0) <= 1, name


def test_a_backbone_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architecture": "caps_net", "model_args": {"backbone_pretrained": True, "backbone": "resnet18"}}
        )
    )
    assert ModelConfig.read(tmp_path / "config.json").model_args == {"backbone": "resnet18"}


def test_a_tag_of_the_zoo_is_for_its_weights_alone(tmp_path: Path) -> None:
    state = capszoo.create_model("idpa_cnn", num_classes=10, in_chans=1, img_size=28).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    config = dict(architecture="idpa_cnn", num_classes=10)
    config["pretrained_cfg"] = dict(input_size=[1, 28, 28], tag="mnist", mean=[0.9], std=[0.3])
    (tmp_path / "config.json").write_text(json.dumps(config))
    for create in (capszoo.create_model, __import__("timm").create_model):
        assert create(f"local-dir:{tmp_path}", pretrained=True).pretrained_cfg.get("tag") is None


def test_one_damaged_file_spares_the_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = _pair(tmp_path).with_suffix(".json")
    sound.rename(tmp_path / "idpa_cnn.x.json")
    (tmp_path / "idpa_cnn.y.json").write_text("{")
    (tmp_path / "idpa_cnn.z.json").write_text(json.dumps({"architecture": "idpa_cnn"}))
    wrong = {**json.loads((tmp_path / "idpa_cnn.x.json").read_text()), "tag": "w", "num_params": "x"}
    (tmp_path / "idpa_cnn.w.json").write_text(json.dumps(wrong))
    monkeypatch.setattr(_info, "weights_folders", lambda: (tmp_path,))
    checkpoints.cache_clear()
    try:
        assert list(checkpoints(aliases=False)) == ["idpa_cnn.x"]
        assert "idpa_cnn.y.json: not readable as JSON" in caplog.text and "lacks the key" in caplog.text
    finally:
        monkeypatch.undo()
        checkpoints.cache_clear()


def test_metadata_of_the_zoo_are_read_as_before() -> None:
    """One file that cannot be read is left out with a warning: none of ours may be."""
    stored = {file.stem for folder in _info.weights_folders() for file in folder.glob("*.json")}
    found = checkpoints(aliases=False)
    assert len(stored) > 20 and set(found) == stored
    assert all(
        isinstance(info, WeightsInfo) and info.input_size and info.label_names for info in found.values()
    )
