"""The app without its page: drawings, uploads, answers, the files of a Space."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image, ImageChops

import capszoo
from capszoo.app import page
from capszoo.app.model import Answer, AppModel, read_drawing, read_upload
from capszoo.app.page import Models, _exported
from capszoo.app.pictures import couplings_picture, data_url, overlay_picture
from capszoo.app.space import REQUIREMENTS, write_space
from capszoo.errors import CapszooError, UsageError
from tests.support.errors import refuses

ASSETS = Path(capszoo.__file__).parent / "assets"


def test_a_drawing_is_read_and_an_empty_one_is_none() -> None:
    drawn = Image.new("RGBA", (28, 28), (0, 0, 0, 255))
    assert read_drawing(data_url(drawn)) is None and read_drawing("") is None
    drawn.putpixel((3, 4), (255, 255, 255, 255))
    found = read_drawing(data_url(drawn))
    assert found is not None and found.mode == "L" and found.getpixel((3, 4)) == 255


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "data:image/png;base64,@@@",
        "data:image/png;base64,AAAA",
        "data:image/png;base64," + "A" * 2**21,
        data_url(Image.new("L", (2000, 2000))),
    ],
    ids=["address", "no base64", "no image", "long", "large"],
)
def test_what_is_no_drawing_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(CapszooError) as caught:
        read_drawing(url)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_bad_upload_is_refused_without_the_server_folder(tmp_path: Path) -> None:
    file = tmp_path / "notes.png"
    file.write_bytes(b"no image")
    with refuses(CapszooError, names=["notes.png"]) as caught:
        read_upload(file)
    assert str(tmp_path) not in str(caught.value)
    Image.new("L", (5000, 4000)).save(file)
    with refuses(CapszooError, names=["16,000,000", "pixels"]):
        read_upload(file)


@pytest.mark.filterwarnings("error")
def test_the_page_s_file_holds_both_columns_of_one_name(tmp_path: Path) -> None:
    answer: Any = SimpleNamespace(view=Image.new("L", (4, 4)), explanation=None, to_dict=dict)
    models: list[Any] = [SimpleNamespace(name=name, iterations=0, dims=0) for name in ("a/run", "b/run", "c")]
    with zipfile.ZipFile(_exported([(model, answer, (), 1) for model in models], tmp_path)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert sorted({name.partition("/")[0] for name in files}) == ["c", "run-1", "run-2"]
    assert json.loads(files["run-2/answer.json"])["model"] == "b/run"
    assert "after_iterations" not in json.loads(files["c/answer.json"])
    first = next(tmp_path.glob("*/capszoo.zip"))
    os.utime(first, (0, 0))
    newer = _exported([(models[2], answer, (), 1)], tmp_path)
    assert [str(path) for path in tmp_path.glob("*/capszoo.zip")] == [newer], "an old file stays"


def test_a_network_with_many_iterations_is_offered_all_of_them() -> None:
    model = AppModel.__new__(AppModel)
    for iterations, most in ((0, 8), (3, 8), (10, 10)):
        model.iterations = iterations
        assert model.max_iterations == most
    shown: Any = SimpleNamespace(explanation="that of the model")
    assert model.settle(shown, 10) == "that of the model"
    with pytest.raises(UsageError, match="give 1 to 10"):
        model.settle(shown, 11)


def test_a_space_holds_its_package_and_the_chosen_weights_alone(root: Path, tmp_path: Path) -> None:
    # the weights of the second are in another folder than its metadata
    names = ["resnet20_routingcaps", "resnet20_dynamic.cifar10"]
    files = {f.as_posix() for f in write_space(names, tmp_path / "space")}
    assert {"app.py", "README.md", "requirements.txt"} <= files
    assert {"capszoo/export/to_onnx.py", "capszoo/app/draw.js"} <= files
    stems = ("resnet20_routingcaps.mnist", "resnet20_dynamic.cifar10")
    weights = {
        f"capszoo/weights/{stem}.{kind}" for stem in stems for kind in ("safetensors", "json", "golden.npz")
    }
    assert weights == {name for name in files if name.startswith("capszoo/weights/")}
    assert not any("__pycache__" in name or name.startswith("capszoo/recipes") for name in files)
    readme = (tmp_path / "space" / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("---\n") and "sdk: gradio\n" in readme and "app_file: app.py\n" in readme
    with refuses(UsageError, names=["empty"]):
        write_space(["resnet20_routingcaps"], tmp_path / "space")
    with refuses(CapszooError, names=["checkpoint", "zoo"]):
        write_space(["cnn_sabour"], tmp_path / "other")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_a_space_installs_what_the_project_needs(root: Path) -> None:
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    app = [one for one in extras["app"] if not one.startswith("capszoo[")]
    assert set(REQUIREMENTS) == {*project["dependencies"], *extras["explain"], *extras["export"], *app}


@pytest.mark.parametrize(
    "name",
    [
        "resnet20_routingcaps.mnist",
        pytest.param("capsnet_dynamic.mnist", marks=pytest.mark.slow),
        pytest.param("idpa_cnn.mnist", marks=pytest.mark.slow),
    ],
)
def test_the_exported_file_answers_as_the_network_does(name: str, tmp_path: Path) -> None:
    model, direct = AppModel(name, tmp_path), capszoo.load(name)
    assert not list(tmp_path.iterdir()), "the export was not deleted"
    for digit in range(10):
        answer = model.answer(Image.open(ASSETS / f"digit_{digit}.png"))
        expected = direct.predict(ASSETS / f"digit_{digit}.png", topk=10)
        assert answer.label == expected.label
        for one in expected.top:
            assert answer.probabilities[one.index] == pytest.approx(one.probability, abs=1e-3)
        heat = direct.explain(ASSETS / f"digit_{digit}.png")
        assert answer.explanation is not None
        assert np.allclose(answer.explanation.heat, heat.heat, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AppModel:
    return AppModel("capsnet_dynamic.mnist", tmp_path_factory.mktemp("app"))


def test_capsule_dimensions_and_iterations_change_the_pictures(model: AppModel) -> None:
    answer = model.answer(Image.open(ASSETS / "digit_3.png"))
    assert model.dims == 16 and model.iterations == 3
    assert answer.explanation is not None and answer.explanation.reconstruction is not None
    plain = np.asarray(model.reconstruct(answer), dtype=np.float64)
    expected = answer.explanation.reconstruction[0].numpy() * 255
    assert np.abs(plain - expected).max() < 1.0
    changed = np.asarray(model.reconstruct(answer, [0.4]), dtype=np.float64)
    assert np.abs(changed - plain).max() > 20
    first, own = model.settle(answer, 1), model.settle(answer, model.iterations)
    assert first is not None and own is not None
    assert np.allclose(own.heat, answer.explanation.heat, atol=1e-6)
    assert not np.allclose(first.heat, own.heat, atol=1e-4)
    assert couplings_picture(own).size == overlay_picture(own, answer.view).size == (280, 280)


def test_a_dropped_image_that_is_dark_on_bright_is_read_inverted(model: AppModel) -> None:
    digit = Image.open(ASSETS / "digit_3.png")
    plain, swapped = model.answer(digit), model.answer(ImageChops.invert(digit))
    assert swapped.label == plain.label == "3" and swapped.view.tobytes() == plain.view.tobytes()
    assert not plain.notes and swapped.notes == ("dark on bright: read with dark and bright swapped",)


def test_the_file_has_the_shares_of_both_numbers_of_iterations(model: AppModel, tmp_path: Path) -> None:
    answer = model.answer(Image.open(ASSETS / "digit_3.png"))
    with zipfile.ZipFile(_exported([(model, answer, (), 1)], tmp_path)) as archive:
        files = {Path(name).name: archive.read(name) for name in archive.namelist()}
    found = json.loads(files["answer.json"])
    assert found["after_iterations"]["routing_iterations"] == 1
    assert files["overlay.png"] != files["overlay-after-iterations.png"]
    assert found["share_relative_to_even"] != found["after_iterations"]["share_relative_to_even"]


def test_a_network_without_routing_says_so(tmp_path: Path) -> None:
    answer = AppModel("cnn_routingpool.fashion_mnist_avg", tmp_path).answer(Image.new("L", (28, 28), 200))
    assert answer.explanation is None and answer.top(3)


def test_classes_of_one_name_are_told_apart() -> None:
    probabilities = np.array([0.6, 0.3, 0.1])
    answer = SimpleNamespace(
        labels=("crane", "cat", "crane"), scores=probabilities, probabilities=probabilities
    )
    assert Answer.top(cast(Any, answer)) == {"crane (0)": 0.6, "cat": 0.3, "crane (2)": 0.1}


def test_a_model_that_is_loaded_does_not_wait_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, finish = threading.Event(), threading.Event()

    def load(name: str, *_: object) -> Any:
        if name == "slow":
            begun.set()
            assert finish.wait(20)
        if name == "damaged":
            made.append(name)
            raise CapszooError("it is damaged: download it again")
        return SimpleNamespace(name=name)

    made: list[str] = []
    monkeypatch.setattr(page, "AppModel", load)
    models = Models(tmp_path)
    first: Any = models.get("first")
    waiting = threading.Thread(target=models.get, args=("slow",))
    waiting.start()
    try:
        assert begun.wait(20) and models.get("first") is first
        for name in ("slow", "next"):
            other = threading.Thread(target=models.get, args=(name,), daemon=True)
            other.start()
            while name not in models._asked:
                time.sleep(0.01)
            with refuses(CapszooError, names=[name]):
                models.get(name, wait=False)
        with refuses(CapszooError, names=["never", "choose"]):
            models.get("never", wait=False)
    finally:
        finish.set()
        waiting.join()
    assert models.get("slow", wait=False).name == "slow"
    for wait in (True, False, True):  # only who waits tries a second time
        with refuses(CapszooError, names=["damaged"]):
            models.get("damaged", wait)
    assert made == ["damaged", "damaged"]
