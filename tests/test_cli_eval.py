"""``capszoo eval`` and the pictures of ``capszoo explain``: what they print and write, and how they fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.models import save_for_hf

import capszoo
from capszoo.data import Batches, DataError, ImageSet, load_dataset
from capszoo.data.folders.common import locate
from capszoo.errors import CapszooError
from capszoo.preprocess import model_transform
from capszoo.recipes.evaluation.iterations import accuracy_by_iterations
from capszoo.recipes.evaluation.metrics import assess
from capszoo.recipes.evaluation.target import _check_root, prepare
from tests.support.command import fails, run, succeeds, write_run
from tests.support.errors import assert_names, refuses

MODEL = "resnet20_routingcaps.mnist"


def test_eval_prints_tables(tiny_mnist: Path) -> None:
    text = succeeds("eval", MODEL, "--data", tiny_mnist, "--device", "cpu")
    assert f"{MODEL} on mnist (test), n = 40; crops: single" in text
    assert "top-1" in text and "recall %" in text and "stated" not in text
    limited = succeeds("eval", MODEL, "--data", tiny_mnist, "--device", "cpu", "--limit", 10, "--seed", 3)
    assert "n = 10 of 40, drawn by seed 3" in limited


def test_eval_json_and_files(tiny_mnist: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "out"
    options = ("--data", tiny_mnist, "--limit", 20, "--device", "cpu", "--batch-size", 20)
    measured = ("--routing", "--robustness", "--pgd-eps", "0,0.1", "--pgd-steps", 2)
    found = json.loads(succeeds("eval", MODEL, *options, *measured, "--out", out, "--json"))
    assert (found["n"], found["of"], found["dataset"]) == (20, 40, "mnist")
    assert sum(map(sum, found["confusion"])) == 20 and len(found["per_class"]) == 10
    assert found["errors"] == 20 - sum(found["confusion"][k][k] for k in range(10))
    zero, tenth = found["robustness"]["pgd"]
    assert zero["accuracy"] == found["top1"] >= tenth["accuracy"] and tenth["steps"] == 2
    for sweep in found["robustness"]["sweeps"]:
        neutral = sweep["amounts"].index(1 if sweep["name"] == "scale" else 0)
        assert sweep["accuracy"][neutral] == found["top1"]
    assert found["robustness"]["affnist"]["n"] == 20
    routing = found["routing"]
    (layer,), (changes,) = routing["layers"], routing["iterations"]
    assert layer["over"] == "children" and 0 < layer["entropy"] < 1
    assert sum(routing["curve"]["share"]) == pytest.approx(100)
    assert changes["own"] == 3 and len(changes["logits"]) == len(changes["couplings"]) == 5
    assert min(changes["logits"]) > 0 and routing["iterations_n"] == 20
    names = {Path(file).name for file in found["files"]}
    drawn = {f"{name}.{kind}" for name in ("confusion", "robustness", "routing") for kind in ("png", "csv")}
    assert names == drawn | {"eval.json"} == {file.name for file in out.iterdir()}, "nothing else is left"
    kept = json.loads((out / "eval.json").read_text())
    assert kept == {key: value for key, value in found.items() if key != "files"}
    text = succeeds("eval", "idpa_cnn.mnist", *options, "--routing")
    row = next(line for line in text.splitlines() if line.startswith("3  ") and "(" in line)
    assert row.count("*") == 3 and "0 (0)" in row, "two iterations of its own, the first of them even"


def test_eval_of_corruptions_and_calibration(tiny_mnist: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("eval", "efficient_capsnet.mnist", "--data", tiny_mnist, "--device", "cpu", "--limit", 10)
    measured = ("--corruptions", "--calibration")
    found = json.loads(succeeds(*options, *measured, "--out", tmp_path / "out", "--json"))
    each = [one["accuracy"] for one in found["corruptions"]["corruptions"]]
    assert len(each) == 12 and found["corruptions"]["mean"] == pytest.approx(
        sum(a for (a,) in each) / 12, abs=1e-3
    )
    calibration = found["calibration"]
    assert calibration["kind"] == "lengths" and calibration["raw"]["ece"] > 10
    assert calibration["temperature"] is None and calibration["reason"], "the set lacks the held-out images"
    drawn = {Path(file).name for file in found["files"]}
    assert {"corruptions.png", "corruptions.csv", "calibration.png", "calibration.csv"} < drawn
    text = succeeds(*options, "--seed", 1, *measured)
    assert "glass blur (blur)" in text and "mean of the 12" in text
    assert "of the lengths" in text and "no temperature: " in text


def test_eval_of_the_claims_about_capsules(tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("captum")
    monkeypatch.setattr("capszoo.recipes.evaluation.deletions.DELETION_IMAGES", 2)
    options = ("eval", MODEL, "--data", tiny_mnist, "--device", "cpu", "--pose", "--deletion", "--seed", 1)
    found = json.loads(succeeds(*options, "--json"))
    assert (found["pose"]["n"], found["pose"]["fitted"], found["pose"]["seed"]) == (20, 20, 1)
    sources = {one["source"] for one in found["pose"]["scores"]}
    assert sources == {"class poses", "class activations", "pooled features", "pixels"}
    assert all(one["interval"][0] <= one["r2"] <= one["interval"][1] for one in found["pose"]["scores"])
    assert [one["method"] for one in found["deletion"]["methods"]] == ["couplings", "gradient", "occlusion"]
    assert found["deletion"]["methods"][0]["n"] == 2
    text = succeeds("eval", "cnn6.mnist", "--data", tiny_mnist, "--device", "cpu", "--pose", "--deletion")
    assert "linear map reads" in text and "no routing" in text and "area over the curve" in text
    plain = ("eval", MODEL, "--data", tiny_mnist)
    fails(2, *plain, "--pose", "--crops", "multi", names=["--pose", "--crops"])
    fails(2, *plain, "--attack", "apdg", names=["apdg", "apgd"])


def test_eval_with_other_numbers_of_iterations(tiny_mnist: Path) -> None:
    options = ("--data", tiny_mnist, "--device", "cpu")
    text = succeeds("eval", MODEL, *options, "--routing-iters", "1,3")
    assert text.splitlines()[-3].split() == ["routing", "iterations", "accuracy", "%", "other", "predictions"]
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["1", "3"]
    found = json.loads(succeeds("eval", MODEL, *options, "--routing-iters", "1,3", "--json"))
    one, own = found["routing_iters"]
    assert own == {"iterations": 3, "accuracy": found["top1"], "changed": 0}
    (expected,) = accuracy_by_iterations(prepare(MODEL, data=tiny_mnist, device="cpu"), [1])
    assert one == {"iterations": 1, "accuracy": expected.accuracy, "changed": expected.changed}
    for text in ("0", "1,a", "", "2,2"):
        fails(2, "eval", MODEL, *options, "--routing-iters", text, names=["--routing-iters"])
    plain = "encapnet6_master.mnist"
    fails(1, "eval", plain, *options, "--routing-iters", "1", names=[plain, "--routing-iters"])


def test_eval_of_several_crops_and_of_the_held_out_part(tiny_mnist: Path) -> None:
    options = ("--data", tiny_mnist, "--device", "cpu", "--json")
    found = json.loads(succeeds("eval", MODEL, *options, "--crops", "multi"))
    assert found["crops"] == "5 of 28x28 out of 32x32 (padded by 2): corners, middle"
    assert found["stated"] is None
    assert "validation split" in fails(1, "eval", MODEL, *options, "--split", "val"), "5,000 of 120 images"


def test_eval_skips_unreadable_images_on_request(tmp_path: Path) -> None:
    for k in range(10):
        (tmp_path / f"{k}").mkdir()
        Image.new("L", (28, 28), 25 * k).save(tmp_path / f"{k}" / "a.png")
    (tmp_path / "3" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    options = ("eval", MODEL, "--data", tmp_path, "--split", "train", "--device", "cpu", "--json")
    line = fails(1, *options)
    assert "broken.png" in line and "export: --skip-bad;" in line
    done = run(*options, "--skip-bad")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and (found["n"], found["of"]) == (10, 10)
    (skipped,) = found["skipped"]
    assert_names(done.stderr, [skipped])
    assert "broken.png" in skipped


def _folder(images: ImageSet, folder: Path, names: Sequence[str], labels: Sequence[int]) -> str:
    """Images as PNG files in `folder`/test, each in the sub-folder with the name of its label."""
    for index, (image, label) in enumerate(zip(images.images, labels, strict=True)):
        (folder / "test" / names[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / "test" / names[label] / f"{index}.png")
    return f"imagefolder:{folder}"


def test_eval_of_a_folder_goes_by_the_names_of_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tiny_mnist: Path
) -> None:
    images = load_dataset("mnist", "test", tiny_mnist)
    net = capszoo.create_model(MODEL, pretrained=True).eval()
    own = tuple(f"digit {k}" for k in (3, 1, 2, 0, 4, 5, 6, 7, 8, 9))
    net.pretrained_cfg["label_names"] = own
    (batch,) = Batches(images, 40).epoch()
    with torch.no_grad():
        guessed = net(batch.images).argmax(1).tolist()  # so that every image is right
    counts = [guessed.count(k) for k in range(10)]

    # each folder has the name of a class: all are found, whatever their order; a class of no image is an empty row
    complete = prepare(net, _folder(images, tmp_path / "complete", own, guessed), device="cpu")
    assert assess(complete).errors == 0 and complete.images.spec.label_names == own
    few = images.subset(torch.tensor([i for i, k in enumerate(guessed) if k not in (1, 2)]))
    kept = [k for k in guessed if k not in (1, 2)]
    fewer = prepare(net, _folder(few, tmp_path / "fewer", own, kept), device="cpu")
    result = assess(fewer)
    assert result.errors == 0 and [row.n for row in result.per_class] == [
        0 if k in (1, 2) else count for k, count in enumerate(counts)
    ]
    assert result.per_class[1].recall is None and any("'digit 1', 'digit 2'" in note for note in fewer.notes)
    assert fewer.notes[0] in caplog.text

    # only numbers, which are no names, go by their order
    by_number = _folder(images, tmp_path / "numbers", [str(k) for k in range(10)], guessed)
    numbered = prepare(net, by_number, device="cpu")
    assert assess(numbered).errors == 0 and any("order" in note for note in numbered.notes)


@pytest.mark.parametrize(
    ("own", "name", "difference"),
    [
        ("caf\u00e9 noir", "Caf\u00e9 noir", "case"),
        ("caf\u00e9 noir", "caf\u00e9_noir", "spaces or underscores"),
        ("caf\u00e9", "cafe\u0301", ""),  # two forms of Unicode are one class
        ("cafe\u0301", "caf\u00e9", ""),
    ],
)
def test_eval_names_a_difference_of_spelling(
    tmp_path: Path, tiny_mnist: Path, own: str, name: str, difference: str
) -> None:
    images, others = load_dataset("mnist", "test", tiny_mnist), [f"digit {k}" for k in range(1, 10)]
    net = capszoo.create_model(MODEL, pretrained=True).eval()
    net.pretrained_cfg["label_names"] = (own, *others)
    folder = _folder(images, tmp_path / "photos", [name, *others], images.labels.tolist())
    if not difference:
        assert prepare(net, folder, device="cpu").images.spec.label_names == (own, *others)
        return
    with pytest.raises(CapszooError) as error:
        prepare(net, folder, device="cpu")
    assert repr(name) in str(error.value) and f"{own!r} in {difference}" in str(error.value)


def test_eval_json_states_what_differs_in_the_classes(tmp_path: Path, tiny_mnist: Path) -> None:
    images = load_dataset("mnist", "test", tiny_mnist)
    names = [*(str(k) for k in range(9)), "nine"]
    _folder(images, tmp_path / "photos", names, images.labels.tolist())
    arguments = ("eval", MODEL, "--data", tmp_path / "photos", "--device", "cpu", "--json")
    assert "'nine'" in fails(1, *arguments)
    found = json.loads(run(*arguments, "--skip-unknown").stdout)
    nines = int((images.labels == 9).sum())
    assert found["left_out"] == {"nine": nines} and found["n"] == 40 - nines
    assert found["per_class"][9]["n"] == 0 and any("'nine'" in note for note in found["notes"])


def test_the_recorded_folder_does_not_replace_a_wrong_one(tmp_path: Path) -> None:
    """`--data` that holds no images by class was ignored, and the accuracy that of the folder of the training."""
    recorded = f"imagefolder:{tmp_path / 'trained'}"
    with refuses(DataError, names=["missing", "folder"]):
        _check_root(recorded, tmp_path / "missing")
    (tmp_path / "deeper" / "cat" / "one").mkdir(parents=True)
    Image.new("L", (28, 28)).save(tmp_path / "deeper" / "cat" / "one" / "0.png")
    with refuses(DataError, names=["sub-folders", "images"]):
        _check_root("imagefolder:photos", tmp_path / "deeper")
    (tmp_path / "photos").mkdir()
    with refuses(DataError, names=["sub-folders", "images"]):
        _check_root(f"imagefolder:{tmp_path / 'photos'}", tmp_path / "deeper")
    _check_root("imagefolder:photos", tmp_path)
    _check_root("mnist", tmp_path / "missing")  # the data set's own reader says so
    with refuses(DataError, names=["missing", "folder"]):
        locate("imagefolder:photos", str(tmp_path / "photos"), tmp_path / "missing")
    assert locate("imagefolder:photos", "photos", tmp_path) == tmp_path / "photos"
    (tmp_path / "train-0.tar").touch()
    with refuses(DataError, names=["train-0.tar", "is a file"]):
        locate("wds:train-0.tar", "train-0.tar", tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_model_saved_for_the_hub_keeps_its_own_normalisation(
    tmp_path: Path, tiny_mnist: Path, channels: int
) -> None:
    net = capszoo.create_model(MODEL, pretrained=True, in_chans=channels)
    save_for_hf(net, str(tmp_path / "mine"), safe_serialization=True)
    images = load_dataset("mnist", "test", tiny_mnist)
    half = (0.5,) * channels  # normalisation of a folder of images
    spec = replace(images.spec, mean=half, std=half, input_size=(channels, 28, 28))
    images = replace(images, spec=spec, images=images.images.expand(-1, channels, -1, -1))
    target = prepare(f"local-dir:{tmp_path / 'mine'}", images, device="cpu")
    own = model_transform(net)
    assert (target.mean, target.std) == (own.mean, own.std) == ((0.1307,) * channels, (0.3081,) * channels)
    assert prepare(net, images, device="cpu").mean == own.mean
    untrained = capszoo.create_model("resnet20_routingcaps", in_chans=channels)
    assert prepare(untrained, images, device="cpu").mean == half


def test_eval_errors(tiny_mnist: Path, trained: Path, tmp_path: Path) -> None:
    data = ("--data", tiny_mnist)
    fails(2, "eval", "resnet20_routingcap", *data, names=["resnet20_routingcaps"])
    fails(1, "eval", trained, *data, names=["--dataset", "NAME"])
    line = fails(1, "eval", trained, *data, "--dataset", "mnist")
    assert "'0'" in line and "'ant', 'bee', 'cat'" in line and "--skip-unknown" in line
    fails(2, "eval", MODEL, *data, "--dataset", "mnst", names=["mnist"])
    fails(1, "eval", MODEL, "--data", tmp_path / "missing", names=["folder"])
    fails(1, "eval", MODEL, *data, "--split", "dev", names=["dev"])
    fails(2, "eval", MODEL, *data, "--crops", "two", names=["two"])
    fails(2, "eval", MODEL, *data, "--robustness", "--pgd-eps", "x", names=["--pgd-eps"])
    assert "add --robustness" in fails(2, "eval", MODEL, *data, "--pgd-eps", "0.1")
    for option in ("--routing", "--corruptions", "--calibration"):
        fails(2, "eval", MODEL, *data, option, "--crops", "multi", names=["--crops"])
    several = ("eval", "efficient_capsnet.multimnist", *data, "--limit", 4)
    fails(1, *several, "--corruptions", names=["1x36x36", "--corruptions"])
    fails(1, *several, "--calibration", names=["--calibration"])
    fails(2, *several, "--robustness", "--pgd-steps", 2, names=["--pgd-steps"])  # PGD needs one label
    file = tmp_path / "file"
    file.write_text("")
    fails(1, "eval", MODEL, *data, "--out", file, names=["file"])
    plain = write_run(tmp_path / "run", sha256="0" * 64)
    assert "sha256 differs" in fails(1, "eval", plain, *data, "--dataset", "mnist")


def test_eval_refuses_before_it_measures_and_prints_what_it_cannot_write(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import capszoo.recipes.evaluation.report as report

    (tmp_path / "wall").write_text("a file where a folder is needed")
    out = tmp_path / "wall" / "out"
    done = run("eval", MODEL, "--data", tiny_mnist, "--limit", 4, "--device", "cpu", "--out", out)
    assert_names(done.stderr, ["write"])
    assert done.exit_code == 1
    assert "top-1" in done.stdout
    plain = capszoo.create_model("resnet20_conv", in_chans=1, img_size=28).eval()
    target = prepare(plain, load_dataset("mnist", "test", tiny_mnist), device="cpu")
    monkeypatch.setattr(report, "assess", lambda *a: pytest.fail("measured before it was refused"))
    with refuses(CapszooError, names=["capsules"]):
        report.measure(target, routing=True)


def test_a_figure_that_is_not_the_stated_one_ends_with_1(tiny_mnist: Path, tmp_path: Path) -> None:
    weights = tmp_path / f"{MODEL}.safetensors"
    stored = Path(capszoo.__file__).parent / "weights" / weights.name
    shutil.copy(stored, weights)
    raw = json.loads(stored.with_suffix(".json").read_text())
    raw["metrics"]["test"] = {"top1": 50.0, "n": 40}
    weights.with_suffix(".json").write_text(json.dumps(raw))
    result = run("eval", weights, "--data", tiny_mnist, "--device", "cpu", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["stated"] == 50.0
    assert_names(result.stderr, ["50.00%", "metadata"])
    assert result.stderr.count("\n") == 1
