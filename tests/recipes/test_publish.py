"""Publishing with the real client against a stand-in Hub: there, back, in the middle of every failure, and again."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save

import capszoo
from capszoo._utils import hub as _hub
from capszoo.data import dataset_spec
from capszoo.recipes.config import load_recipe
from capszoo.recipes.evaluation.target import create_for
from capszoo.recipes.publish import PublishError, publish
from capszoo.recipes.release.public import public
from capszoo.recipes.weights import write_weights
from tests.support import packed
from tests.support.errors import assert_names, refuses
from tests.support.hub import Fault, Hub, Repo
from tests.support.hub_client import Client, Done
from tests.support.recipes import HISTORY, write_photos

LABELS = ("cat", "dog", "owl")
FILES = set(
    "README.md config.json curves.png golden.safetensors labels.txt metadata.json model.safetensors".split()
)
DIGIT = Path(capszoo.__file__).parent / "assets" / "digit_3.png"


def write_run(folder: Path, seed: int = 0) -> Path:
    """What a user's own run leaves: other classes, a folder as data set, no paper's figure."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    torch.manual_seed(seed)
    spec = replace(dataset_spec("mnist"), label_names=LABELS)
    args = {"depth": 8}
    net = create_for("resnet20_routingcaps", len(LABELS), spec.input_size, args)
    dataset = "imagefolder:/home/someone/pets"
    details: dict[str, Any] = {
        "description": "fine-tuned on pets",
        "recipe": {"epochs": 2, "seed": seed, "data": {"name": dataset}},
        "seed": seed,
        "dataset": {"name": dataset, "title": "pets", "sha256": {"train": "0" * 64}},
        "hardware": "a processor",
        "train_seconds": 12,
        "metrics": {"test": {"top1": 60.0, "errors": 16, "n": 40}},
    }
    pixels = torch.randint(0, 256, (4, *spec.input_size), dtype=torch.uint8)
    names: dict[str, Any] = {"architecture": "resnet20_routingcaps", "tag": "pets", "model_args": args}
    write_weights(folder, net, **names, spec=spec, golden_pixels=pixels, details=details)
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def client(root: Path, hub: Hub, home: Path) -> Iterator[Client]:
    client = Client(root, hub.url, home)
    yield client
    client.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "pets")


@pytest.fixture(autouse=True)
def _as_new(hub: Hub) -> Iterator[None]:
    hub.faults, hub.calls = [], []
    yield
    assert not hub.unknown, "the client asks for what the stand-in does not know"


def scores(repo_id: str, library: str = "capszoo", name: str = "hf-hub:") -> str:
    """Code that prints the scores of the golden images as JSON."""
    return f"""
import capszoo, timm, json, torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
golden = load_file(hf_hub_download("{repo_id}", "golden.safetensors"))
model = {library}.create_model("{name}{repo_id if name == "hf-hub:" else ""}", pretrained=True).eval()
cfg = model.pretrained_cfg
images = (golden["pixels"].float() / 255 - cfg["mean"][0]) / cfg["std"][0]
with torch.no_grad():
    off = (model(images) - golden["scores"]).abs().max() / golden["scores"].abs().max()
print(json.dumps({{"off": float(off), "labels": cfg["label_names"], "classes": model.num_classes}}))
"""


def passed(done: Done) -> Done:
    assert done.code == 0, done.err
    return done


def failed(done: Done, *names: str) -> Done:
    """A command that ended with 1 and one line, which names these."""
    assert done.code == 1
    assert_names(done.error, names)
    return done


def same(done: Done) -> dict[str, Any]:
    found = json.loads(passed(done).out)
    assert found["off"] <= 1e-4
    return found


def test_there_and_back(hub: Hub, client: Client, run: Path, home: Path, root: Path, tmp_path: Path) -> None:
    done = passed(client.capszoo("publish", run, "me/pets", "--json"))
    (result,) = json.loads(done.out)
    assert result["changed"] and result["url"] == f"{hub.url}/me/pets" and not done.waited
    repo = hub.repos["me/pets"]
    assert set(repo.files) == FILES and len(repo.trees) == 2, "one commit"
    assert hub.sent("POST", "/commit/") == 1
    stated = json.loads((run / "resnet20_routingcaps.pets.json").read_text())
    assert json.loads(repo.files["config.json"])["sha256"] == stated["sha256"]
    assert repo.tags == {f"sha256-{stated['sha256'][:12]}": repo.sha}
    assert repo.files["labels.txt"].decode().split() == list(LABELS)
    assert b"/home/" not in b"".join(repo.files.values()), "paths of the user's machine stay there"

    for library in ("capszoo", "timm"):
        found = same(client.python(scores("me/pets", library)))
        assert found["labels"] == list(LABELS) and found["classes"] == 3
    (card,) = [repo.files["README.md"].decode()]
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    done = passed(client.python(snippet.replace("picture.png", str(DIGIT))))
    assert {line.split()[0] for line in done.out.splitlines()} == set(LABELS)
    done = client.capszoo("predict", "hf-hub:me/pets", DIGIT, "--json")
    assert json.loads(done.out)["results"][0]["predictions"][0]["label"] in LABELS

    puts = hub.sent("PUT", "/lfs/")
    done = client.capszoo("publish", run, "me/pets")
    assert done.code == 0 and "nothing had changed" in done.out
    assert len(repo.trees) == 2 and hub.sent("PUT", "/lfs/") == puts, "nothing is sent twice"
    repo.files.update({"confusion.png": b"of earlier weights", "notes.md": b"the user's own"})
    done = client.capszoo("publish", run, "me/pets")
    assert done.code == 0 and set(repo.files) == {*FILES, "notes.md"}, (
        "a picture of other weights does not stay"
    )

    # Without a network, in a process of its own: out of the cache.
    offline = Client(root, "http://127.0.0.1:9", home, HF_HUB_OFFLINE="1")
    try:
        for library in ("capszoo", "timm"):
            same(offline.python(scores("me/pets", library)))
        failed(offline.capszoo("predict", "hf-hub:me/never-seen", DIGIT), "me/never-seen")
        code = "from capszoo._pretrained.files import *; download_weights('me/never-seen', local_name='x.safetensors')"
        done = offline.python(code)
        assert_names(done.error, ["me/never-seen", "weights"])
        assert "http://127.0.0.1:9/me/never-seen" in done.error, "the mirror that HF_ENDPOINT names"
        failed(offline.capszoo("publish", run, "me/pets"), "HF_HUB_OFFLINE", "unset")
    finally:
        offline.close()


@pytest.mark.parametrize(
    ("status", "code", "names"),
    [
        (401, "RepoNotFound", ["hf auth login", "HF_TOKEN"]),
        (403, "GatedRepo", ["gated", "{url}/me/dogs", "HF_TOKEN"]),
        (404, "RevisionNotFound", ["no revision v9", "{url}/me/dogs"]),
        (500, "", ["{url}"]),
    ],
)
def test_what_the_hub_refuses_names_the_remedy(
    hub: Hub, client: Client, status: int, code: str, names: list[str]
) -> None:
    """And the mirror, not the Hub, where HF_ENDPOINT names one."""
    headers = {"X-Error-Code": code} if code else {}
    hub.faults = [Fault(method, "me/dogs", status, headers, times=20) for method in ("HEAD", "GET")]
    done = client.capszoo("predict", "hf-hub:me/dogs@v9", DIGIT, token=None)
    hub.faults = []
    assert done.code == 1 and all(name.format(url=hub.url) in done.error for name in names), done.error
    assert "huggingface.co" not in done.error


@pytest.mark.slow
def test_fine_tuned_from_the_hub_and_published_again(
    hub: Hub, client: Client, root: Path, tmp_path: Path
) -> None:
    passed(client.capszoo("publish", "resnet20_routingcaps.mnist", "me/digits"))
    repo = hub.repos["me/digits"]
    stated = json.loads(repo.files["metadata.json"])
    stated["recipe"]["loss"] = {"name": "spread"}  # not what this architecture's recipes say
    repo.trees["3" * 40] = {**repo.files, "metadata.json": json.dumps(stated).encode()}
    photos = write_photos(packed(root, "mnist"), tmp_path / "photos", {"one": 8, "three": 8, "eight": 8})
    out, options = tmp_path / "run", ("--data", photos, "--device", "cpu", "--epochs")
    passed(client.capszoo("finetune", "hf-hub:me/digits", "--out", out, *options, "5"))
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.init and recipe.init.weights == "hf-hub:me/digits" and recipe.loss.name == "spread"
    assert recipe.optimizer.layer_decay and recipe.description.endswith("from hf-hub:me/digits")
    images = sorted(photos.rglob("*.png"))
    done = passed(client.capszoo("predict", out, *images, "--json"))
    right = [r["predictions"][0]["label"] in r["image"] for r in json.loads(done.out)["results"]]
    assert sum(right) >= 18, "of 24 digits that the weights knew before"

    passed(client.capszoo("publish", out, "me/photos"))
    files = hub.repos["me/photos"].files
    assert set(files) == {*FILES, "confusion.png"} and b"from `hf-hub:me/digits`" in files["README.md"]
    passed(client.capszoo("predict", "hf-hub:me/photos", images[0]))

    # A repository that capszoo did not publish: no metadata, so the architecture's usual loss.
    bare = {name: repo.files[name] for name in ("config.json", "model.safetensors")}
    hub.repos["me/bare"] = Repo(False, {"4" * 40: bare})
    passed(client.capszoo("finetune", "hf-hub:me/bare", "--out", tmp_path / "bare", *options, "1"))
    assert load_recipe(tmp_path / "bare" / "recipe.yaml").loss.name == "margin"


@pytest.mark.slow
def test_export_from_the_hub(hub: Hub, client: Client, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[export]'")
    passed(client.capszoo("publish", run, "me/exported"))
    out = tmp_path / "bundle"
    passed(client.capszoo("export", "hf-hub:me/exported", "--out", out, "--quick"))
    assert (out / "labels.txt").read_text().split() == list(LABELS)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"]["source"] == "hf-hub:me/exported"
    passed(client.capszoo("check", out))


def test_a_checkpoint_of_the_zoo_by_its_tag(hub: Hub, client: Client) -> None:
    """As from a wheel without the file: the tag leads to the Hub, and its sha256 is the one of the metadata."""
    name = "resnet20_routingcaps.mnist"
    passed(client.capszoo("publish", name, f"capszoo/{name}"))
    absent = "from pathlib import Path; from capszoo._pretrained import info as p, catalogue as c\n"
    absent += "c.checkpoints(); old, p.weights_folders = p.weights_folders, lambda: (Path('/nowhere'),)\ntry:"
    absent += (
        scores(f"capszoo/{name}", name=name).replace("\n", "\n    ") + "\nfinally: p.weights_folders = old"
    )
    assert same(client.python(absent))["labels"] == list("0123456789")
    assert hub.sent("GET", "resolve/.*/model.safetensors") == 1
    assert same(client.python(absent)) and hub.sent("GET", "resolve/.*/model.safetensors") == 1, (
        "out of the cache"
    )
    repo = hub.repos[f"capszoo/{name}"]
    repo.trees["2" * 40] = {**repo.files, "model.safetensors": save({"other": torch.zeros(1)})}
    assert same(client.python(absent)), "newer weights do not take an older capszoo's away"
    before = hub.sent("GET", "resolve/.*/model.safetensors")
    assert same(client.python(absent)) and hub.sent("GET", "resolve/.*/model.safetensors") == before
    repo.tags.clear()
    for _ in range(2):
        failed(client.python(absent), "expected", "capszoo")
    assert hub.sent("GET", "resolve/.*/model.safetensors") == before, "intact weights of another version stay"
    failed(client.python(absent), "sha256", "model.safetensors")


@pytest.mark.parametrize("stated", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from capszoo._utils.hub import limit_hub_waits

    monkeypatch.setenv("CAPSZOO_HUB_TIMEOUT", stated)
    with refuses(capszoo.errors.UsageError, names=["CAPSZOO_HUB_TIMEOUT"]):
        limit_hub_waits()


REDIRECTED, MOVED = ("/repos/create", "/preupload/", "/commit/"), {"Location": "/nowhere"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("POST", "/preupload/", 429, {"RateLimit": '"api";r=0;t=7'}, times=99), "again in 7 s"),
        (Fault("PUT", "/lfs/", drop=True, times=99), "the connection to the Hub broke"),
        (Fault("POST", "/commit/", 500), "the Hub failed (500)"),
        (Fault("POST", REDIRECTED[0], 302, MOVED, times=99), "the Hub knows no me/"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Fault("POST", "/validate-yaml", 503), "the Hub failed (503)"),
                (Fault("POST", "/commit/", 409), "changed by someone else at the same time"),
                (Fault("POST", "/commit/", drop=True), "the connection to the Hub broke"),
                (Fault("POST", "/repos/create", hang=8, times=99), "the connection to the Hub broke"),
                (Fault("POST", "/commit/", hang=8, times=99), "the connection to the Hub broke"),
                *((Fault("POST", path, 302, MOVED, times=99), "the Hub") for path in REDIRECTED[1:]),
            )
        ),
    ],
    ids=lambda value: (
        f"{value.path}-{value.status or value.hang or 'drop'}" if isinstance(value, Fault) else ""
    ),
)
def test_every_failure_is_one_line_and_a_repeat_finishes(
    hub: Hub, client: Client, tmp_path: Path, fault: Fault, message: str
) -> None:
    name = re.sub(r"\W+", "-", f"{fault.path}{fault.status}{fault.hang:.0f}").strip("-")
    # weights of its own, which the Hub has not
    run = write_run(tmp_path / "run", seed=zlib.crc32(name.encode()))
    hub.faults = [fault]
    done = client.capszoo("publish", run, f"me/{name}")
    assert done.code == 1 and message in done.error, done.err
    before = hub.repos.get(f"me/{name}")
    assert before is None or not before.files, "nothing half-published"
    if fault.status == 302:
        hub.unknown.clear()  # where the redirect led
    hub.faults, arrived = [], {path for call, path in hub.calls if call == "PUT" and path[5:] in hub.lfs}
    hub.calls = []
    passed(client.capszoo("publish", run, f"me/{name}"))
    assert set(hub.repos[f"me/{name}"].files) == FILES
    again = {path for call, path in hub.calls if call == "PUT"}
    assert not again & arrived, "a large file that had arrived was sent again"
    if "commit" in fault.path:
        assert arrived and not again


def test_no_token_and_a_wrong_one(hub: Hub, client: Client, run: Path) -> None:
    failed(client.capszoo("publish", run, "me/nobody", token=None), "401", "token", "auth", "login")
    done = failed(client.capszoo("publish", run, "me/nobody", token="hf_wrong"), "401", "accept")
    assert "hf_wrong" not in done.err + done.out and "me/nobody" not in hub.repos


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        (Fault("POST", "/repos/create", 429, {"Retry-After": "7"}), 7),
        (Fault("POST", "/commit/", 429, {"Retry-After": "7"}, times=2), 7),
        (Fault("PUT", "/lfs/", drop=True, times=2), 1),
    ],
    ids=["create", "commit", "upload"],
)
def test_what_passes_by_itself_is_waited_for(
    hub: Hub, client: Client, tmp_path: Path, fault: Fault, waited: int
) -> None:
    hub.faults = [fault]
    name = "me/passing-" + re.sub(r"\W+", "-", fault.path).strip("-")
    run = write_run(tmp_path / "run", seed=zlib.crc32(name.encode()))
    done = passed(client.capszoo("publish", run, name))
    assert waited in [round(seconds) for seconds in done.waited] and set(hub.repos[name].files) == FILES


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "import capszoo; capszoo.create_model('hf-hub:me/{}', pretrained=True)"),
        ("metadata.json", "from capszoo.checkpoint import resolve; resolve('hf-hub:me/{}').metadata()"),
    ],
)
def test_a_file_damaged_in_the_cache_is_fetched_anew(
    hub: Hub, client: Client, tmp_path: Path, home: Path, name: str, code: str
) -> None:
    repo = f"cached-{Path(name).stem}"
    code = code.format(repo)
    passed(client.capszoo("publish", write_run(tmp_path / "run", seed=len(name)), f"me/{repo}"))
    passed(client.python(code))
    (cached,) = (home / "hub" / f"models--me--{repo}").glob(f"snapshots/*/{name}")
    whole = cached.read_bytes()
    for damaged in (b"", whole[:100], b"[]", b"null", b"\xff" + whole):
        cached.resolve().write_bytes(damaged)
        done = client.python(code)
        assert done.code == 0 and cached.read_bytes() == whole, (damaged[:20], done.err)
    cached.resolve().write_bytes(b"[]")
    if name == "metadata.json":
        hub.faults = [Fault("GET", name, 500, times=99)]
        failed(client.python(code), "JSON")
        return
    hub.faults = [Fault("GET", name, 302, {"Location": "file:///etc/passwd"}, times=99)]
    done = client.capszoo("predict", f"hf-hub:me/{repo}", DIGIT)
    assert done.code == 1 and "root:" not in done.err and len(done.error) < 600
    hub.faults = []
    passed(client.python(code))


@pytest.mark.slow
def test_a_hub_that_never_answers_a_download_is_given_up(hub: Hub, client: Client, tmp_path: Path) -> None:
    passed(client.capszoo("publish", write_run(tmp_path / "run", seed=9), "me/silent"))
    hub.faults = [Fault(method, "/silent/resolve/", hang=8, times=99) for method in ("HEAD", "GET")]
    start = time.monotonic()
    failed(client.capszoo("predict", "hf-hub:me/silent", DIGIT), "me/silent")
    assert time.monotonic() - start < 120


@pytest.mark.parametrize("stated", [True, False])
def test_a_damaged_download_does_not_stay(
    hub: Hub, client: Client, tmp_path: Path, home: Path, stated: bool
) -> None:
    """Nor where the repository states no sha256: the client names the file by it."""
    passed(client.capszoo("publish", write_run(tmp_path / "run", seed=5), "me/damaged"))
    if not stated:
        repo = hub.repos["me/damaged"]
        config = json.loads(repo.files["config.json"])
        del config["sha256"]
        repo.files["config.json"] = json.dumps(config).encode()
        repo.tags.clear()
    for library in ("capszoo", "timm"):
        code = f"import capszoo, timm; {library}.create_model('hf-hub:me/damaged', pretrained=True)"
        hub.faults = [Fault("GET", "model.safetensors", corrupt=True)]
        failed(client.python(code), "removed", "cache")
        assert client.python(code).code == 0, "fetched anew"
        client.python(f"import shutil; shutil.rmtree({str(home / 'hub' / 'models--me--damaged')!r})")
    hub.faults = [Fault("GET", "model.safetensors", drop=True, times=99)]
    passed(client.capszoo("publish", write_run(tmp_path / "other", seed=6), "me/damaged"))
    failed(client.capszoo("predict", "hf-hub:me/damaged", DIGIT), "me/damaged")
    failed(client.python(code), "me/damaged")
    hub.faults = []
    assert same(client.python(scores("me/damaged")))


def test_nothing_but_safetensors_is_loaded(hub: Hub, client: Client) -> None:
    size = {"pretrained_cfg": {"input_size": [1, 28, 28]}}
    ours = {"architecture": "resnet20_routingcaps", "num_classes": 10, **size}
    timms = {"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": {"input_size": [3, 32, 32]}}
    load = "import capszoo, timm; {}.create_model('hf-hub:else/{}', pretrained=True)"
    for name, config in (("ours", ours), ("timms", timms)):
        hub.add(f"else/{name}", config__json=json.dumps(config).encode(), pytorch_model__bin=b"a pickle")
        done = failed(client.python(load.format("capszoo", name)), f"else/{name}", "model.safetensors")
        assert_names(done.error, ["nothing", "loaded"])
    failed(client.python(load.format("timm", "ours")), "else/ours", "model.safetensors")
    failed(client.capszoo("predict", "hf-hub:else/ours", DIGIT), "model.safetensors")
    assert not hub.sent("GET", "pytorch_model.bin")


def test_private(hub: Hub, client: Client, run: Path) -> None:
    passed(client.capszoo("publish", run, "me/secret", "--private"))
    repo = hub.repos["me/secret"]
    assert repo.private and b"as the repository is private" in repo.files["README.md"]
    load = "import capszoo; capszoo.create_model('hf-hub:me/secret', pretrained=True)"
    assert client.python(load).code == 1
    passed(client.python(load, token="hf_right"))
    hub.add("me/open")
    failed(client.capszoo("publish", run, "me/open", "--private"), "exists", "public")
    assert not hub.repos["me/open"].files


def test_a_dry_run_makes_no_call(hub: Hub, client: Client, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "staged"
    done = client.capszoo("publish", run, "me/dry", "--dry-run", "--out", out, token=None)
    assert done.code == 0 and "nothing was sent" in done.out and not hub.calls
    assert {path.name for path in out.iterdir()} == FILES
    for name in FILES:
        assert f"me/dry/{name}" in done.out
    failed(client.capszoo("publish", run, "me/dry", "--dry-run", "--out", out, token=None), "exists")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["staged"], "nothing half-written"


@pytest.mark.slow
def test_the_whole_zoo(hub: Hub, client: Client, tmp_path: Path) -> None:
    some = ("idpa_cnn.mnist", "resnet20_routingcaps.mnist")
    fewer = "from capszoo.recipes import publish as m; m.every = m.checkpoints(aliases=False)\n"
    fewer += f"m.checkpoints = lambda **_: {{name: m.every[name] for name in {some}}}"
    passed(client.python(fewer))
    hub.faults = [Fault("POST", "routingcaps.mnist/commit/", 500)]
    passed(client.capszoo("publish", "--all", "zoo", "--dry-run"))
    assert not hub.calls
    command = ("publish", "--all", "zoo", "--out", str(tmp_path / "kept"))
    failed(client.capszoo(*command), "resnet20_routingcaps.mnist", "1", "2")
    passed(client.capszoo(*command))  # files of the first call are replaced
    assert {path.name for path in (tmp_path / "kept").iterdir()} == set(some)
    kept = tmp_path / "kept" / some[0] / "notes.md"
    kept.write_text("the user's own")
    failed(client.capszoo("publish", "--all", "zoo", "--dry-run", "--out", str(tmp_path / "kept")), some[0])
    assert kept.exists()
    (tmp_path / "other" / some[0]).mkdir(parents=True)
    other = ("--out", str(tmp_path / "other"))  # a folder of the user's own
    failed(client.capszoo("publish", "--all", "zoo", "--dry-run", *other), f"{some[0]} exists already")
    for name in some:
        assert set(hub.repos[f"zoo/{name}"].files) == FILES
    client.python("from capszoo.recipes import publish as m; m.checkpoints = lambda **_: m.every")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "publish takes a RUN and a USER/NAME"),
        (("run",), 2, "publish takes a RUN and a USER/NAME"),
        (("idpa_cnn.mnist", "me/x", "--all", "zoo"), 2, "--all takes every checkpoint"),
        (("idpa_cnn.mnist", "no-slash"), 2, "is no name of a repository"),
        (("idpa_cnn.mnist", "mé/x"), 2, "the Hub takes no repository of this name"),
        (("idpa_cnn.mnist", "me/" + "x" * 120, "--dry-run"), 2, "the Hub takes no repository of this name"),
        (("idpa_cnn.mnist", "me/x.git", "--dry-run"), 2, "the Hub takes no repository of this name"),
        (("idpa_cnn.nothing", "me/x"), 1, "neither the folder of a finished run"),
        ((".", "me/x"), 1, "is not a finished run"),
    ],
)
def test_wrong_calls(hub: Hub, client: Client, args: tuple[str, ...], code: int, message: str) -> None:
    done = client.capszoo("publish", *args)
    assert done.code == code and message in done.error and not hub.calls


def test_a_space_keeps_the_user_s_files_and_none_of_ours_that_are_gone(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    call = "from capszoo.app.space import upload_space; upload_space({!r}, 'me/room', private={})"
    for name in ("old", "new"):
        package = tmp_path / name / "capszoo" / "weights"
        package.mkdir(parents=True)
        (package / f"{name}.py").write_text(name)
        (tmp_path / name / "app.py").write_text(name)
    passed(client.python(call.format(str(tmp_path / "old"), False), token="hf_right"))
    assert set(hub.repos["me/room"].files) == {"app.py", "capszoo/weights/old.py"}
    hub.add("me/room", **hub.repos["me/room"].files, notes=b"the user's")
    passed(client.python(call.format(str(tmp_path / "new"), False), token="hf_right"))
    assert set(hub.repos["me/room"].files) == {"app.py", "capszoo/weights/new.py", "notes"}
    done = client.python(call.format(str(tmp_path / "new"), True), token="hf_right")
    assert_names(done.err, ["me/room"])
    assert done.code == 1


def test_a_private_space_by_the_command(hub: Hub, client: Client, tmp_path: Path) -> None:
    call = ("publish", "idpa_cnn.mnist", "me/hidden", "--space")
    done = passed(client.capszoo(*call, "--private", "--out", tmp_path / "kept"))
    repo = hub.repos["me/hidden"]
    assert repo.private and {"app.py", "capszoo/weights/idpa_cnn.mnist.safetensors"} <= set(repo.files)
    assert "me/hidden: published, " in done.out and (tmp_path / "kept" / "app.py").is_file()


def test_a_user_s_own_images_are_not_uploaded(run: Path, tmp_path: Path) -> None:
    publish(run, "me/pets", dry_run=True, out=tmp_path / "out")
    with np.load(run / "resnet20_routingcaps.pets.golden.npz") as stored:
        sent = load_file(tmp_path / "out" / "golden.safetensors")
        assert sent["pixels"].shape == stored["pixels"].shape
        assert not np.array_equal(sent["pixels"].numpy(), stored["pixels"])


def test_a_picture_of_another_evaluation_is_not_sent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    Image.new("L", (8, 8)).save(run / "confusion.png")

    def sent() -> set[str]:
        return {file["name"] for file in publish(run, "me/pets", dry_run=True)["files"]}

    assert "confusion.png" in sent()
    (run / "eval.json").write_text("{}")  # of `capszoo eval --out`, which draws a picture of that name
    assert "confusion.png" not in sent()


def test_other_scores_than_the_runs_are_not_sent(run: Path, tmp_path: Path) -> None:
    copy = write_run(tmp_path / "run")
    golden = copy / "resnet20_routingcaps.pets.golden.npz"
    arrays = dict(np.load(golden))
    arrays["scores"] = arrays["scores"] * 1.01
    np.savez(golden, **arrays)
    with refuses(PublishError, names=["differ", "outputs"]):
        publish(copy, "me/other", dry_run=True)
    golden.unlink()  # a run without golden outputs gets some
    assert publish(copy, "me/other", dry_run=True)["files"]


def test_labels_that_look_like_paths_are_published_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    metadata, labels = next(run.glob("*.json")), ["/", "/m/01g317", "~/x"]
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "label_names": labels}))
    publish(run, "me/symbols", dry_run=True, out=tmp_path / "out")
    for name in ("metadata.json", "config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["label_names"] == labels, name
    assert (tmp_path / "out" / "labels.txt").read_text().splitlines() == labels
    assert "/home/someone" not in (tmp_path / "out" / "metadata.json").read_text()


def test_no_private_names() -> None:
    names = [
        "imagefolder:/home/me/pets",
        "imagefolder:photos/smith",
        "hf:/x/smith",
        "/data/x",
        "~/pets",
        "C:\\data\\x",
    ]
    hidden = ["imagefolder:private"] * 2 + ["hf:private"] + ["private"] * 3
    kept = ["hf:owner/name", "mnist", 3, None]
    assert public({"a": [*names, *kept]}) == {"a": [*hidden, *kept]}
    for start in ("runs/smith", "smith", "runs/smith/x.safetensors", "backbone:local-dir:smith"):
        assert "smith" not in str(
            public({"init": {"weights": start}, "description": f"fine-tuned from {start}"})
        )
    for start in ("hf-hub:me/pets", "capsnet_dynamic.mnist", "backbone:resnet18.a1_in1k"):
        assert public({"weights": start}) == {"weights": start}
        fold = {"description": f"fine-tuned from {start}, fold 1 of 2"}
        assert public(fold) == fold


def test_names_of_folders_are_not_published(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    metadata = next(run.glob("*.json"))
    raw = json.loads(metadata.read_text())
    name = "imagefolder:photos/patients_smith"
    raw["dataset"] |= {"name": name, "title": name, "source": name}
    raw["dataset"] |= {"left_out": ["photos/patients_smith/a.png: bad"]}
    raw["recipe"] |= {
        "data": {"name": name},
        "init": {"weights": "runs/patients_smith"},
        "tag": "patients_smith",
    }
    raw |= {"tag": "patients_smith", "description": "fine-tuned from runs/patients_smith"}
    raw["seeds"] = {"recipe": "resnet20_routingcaps.patients_smith"}
    for file in list(run.iterdir()):
        if file.name.startswith(f"{metadata.stem}."):
            file.rename(run / file.name.replace(metadata.stem, "resnet20_routingcaps.patients_smith"))
    (run / "resnet20_routingcaps.patients_smith.json").write_text(json.dumps(raw))
    publish(run, "me/pets", dry_run=True, out=tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert b"smith" not in file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("status", "headers", "problem", "remedy"),
    [
        (401, {}, "the Hub needs a token (401)", "run `hf auth login`"),
        (403, {}, "your token may not write to ann/pets (403)", "a namespace other than ann"),
        (404, {}, "the Hub knows no ann/pets (404)", "your account or organisation owns ann/"),
        (412, {}, "was changed by someone else at the same time, or is taken (412)", "choose another name"),
        (429, {"Retry-After": " 7 "}, "too many calls (429)", "give the same command again in 7 s"),
        (429, {"RateLimit": "limit;r=0;t=12"}, "too many calls (429)", "give the same command again in 12 s"),
        (429, {}, "too many calls (429)", "in some minutes"),
        (502, {}, "the Hub failed (502)", "it resumes there"),
        (418, {}, "the Hub refuses ann/pets (418: short and stout)", "fix that, then run the command again"),
        (None, {}, "the Hub's answer is invalid (ValueError: short and stout)", "check HF_ENDPOINT"),
    ],
)
def test_every_status_of_the_hub_has_its_message(
    status: int | None, headers: dict[str, str], problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    error: Any = ValueError("short\nand  stout")
    error.response = SimpleNamespace(status_code=status, headers=headers)
    assert _hub._status(error) == status
    message = str(_hub._explained(error, status, _hub._wait(error), "ann/pets"))
    assert problem in message and remedy in message and "\n" not in message


def test_a_second_name_of_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    """Its file has the keys of the network that it was trained as."""
    with pytest.raises(PublishError, match="resnet20_routingpool.cifar10_avg"):
        publish("resnet20_avg.cifar10_avg", "me/x", dry_run=True, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()
