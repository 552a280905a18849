"""What starts without torch, how names of the package are resolved, and that timm knows our models in either order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import capszoo
from tests.support import load_script

HEAVY = "torch torchvision timm numpy pydantic_settings matplotlib onnxruntime huggingface_hub".split()


def _python(root: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = (
        [sys.executable, "-c", code, *arguments],
        {**os.environ, "PYTHONPATH": str(root), **environment},
    )
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=240)


#: Runs several command lines, given as JSON; prints what each wrote and which of the heavy libraries it has loaded.
_RUN_EACH = f"""
import contextlib, io, json, sys
from capszoo.cli import main
results = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["capszoo", *line.split()]
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written), contextlib.suppress(SystemExit):
        main()
    results.append((written.getvalue(), [name for name in {HEAVY!r} if name in sys.modules]))
print(json.dumps(results))
"""


def test_no_torch_where_nothing_is_computed(root: Path) -> None:
    cases = [
        ("--help", "Usage: capszoo"),
        ("--version", capszoo.__version__),
        ("list", "resnet20_routingcaps"),
        ("list mnist --pretrained --json", "resnet20_routingcaps.mnist"),
        ("info idpa_resnet", "multiply-adds"),
        ("info idpa_resnet.cifar10 --json", "multiply_adds"),
        ("export --help", "--opset"),
        ("nosuch", "No such command"),
        ("list --nosuch", "No such option"),
        ("info idpa_resnt", "did you mean 'idpa_resnet'"),
        ("predict idpa_resnt x.png", "did you mean 'idpa_resnet'"),
        ("predict idpa_resnet nosuch.png", "nosuch.png: no such file"),
        ("explain heatmap idpa_resnt x.png", "did you mean 'idpa_resnet'"),
        ("compare idpa_resnet idpa_resnt", "did you mean 'idpa_resnet'"),
        ("benchmark idpa_resnt", "did you mean 'idpa_resnet'"),
        ("recipes show idpa_resnet.cifar1", "did you mean 'idpa_resnet.cifar10'"),
        ("recipes --help", "validate"),
        ("recipes list mnist", "resnet20_routingcaps.mnist"),
        ("recipes validate idpa_resnet.cifar10 --set epocs=2", "did you mean 'epochs'"),
        ("train idpa_resnet.cifar10 --profile nosuch", "unknown profile 'nosuch'"),
        ("data list", "cifar10"),
        ("predict idpa_cnn https://example.org/x.png", "x.png is on the web"),
        ("eval idpa_cnn.mnist --device gpu", "unknown device 'gpu'"),
        ("export idpa_cnn --format coreml --out x.onnx", "unknown format 'coreml'"),
        ("finetune idpa_resnt --data capszoo", "did you mean 'idpa_resnet'"),
        ("finetune idpa_resnet.cifar10 --data nosuch", "nosuch: no such folder"),
        ("eval idpa_resnet.cifar10 --dataset nosuch", "unknown data set 'nosuch'"),
        ("eval idpa_resnet.cifar", "no weights 'cifar' for idpa_resnet"),
        ("export idpa_resnt --out x.onnx", "did you mean 'idpa_resnet'"),
    ]
    done = _python(root, _RUN_EACH, json.dumps([line for line, _ in cases]))
    assert done.returncode == 0, done.stderr
    for (line, expected), (written, loaded) in zip(cases, json.loads(done.stdout), strict=True):
        assert expected in written, (line, written)
        assert loaded == [], line  # by this line, or by one before it


def test_completion_needs_no_torch(root: Path) -> None:
    for words in ("capszoo predict idpa_", "capszoo train idpa_resnet."):
        environment = load_script(root / "benchmarks" / "startup.py").completion_environment(words)
        done = _python(root, f"import sys\n{_RUN_EACH}", json.dumps([""]), **environment)
        assert done.returncode == 0, done.stderr
        ((written, loaded),) = json.loads(done.stdout)
        assert "idpa_resnet.cifar10" in written.split() and loaded == []


#: Each public name is there, and an unknown one is an AttributeError.
_EVERY_NAME = """
import capszoo
for name in capszoo.__all__: assert getattr(capszoo, name) is not None and name in dir(capszoo), name
assert capszoo.models.CapsuleNet is capszoo.CapsuleNet and capszoo.layers
from capszoo.errors import UnknownModel; assert UnknownModel is capszoo.UnknownModel
try: capszoo.nosuch
except AttributeError as error: assert 'nosuch' in str(error)
else: raise AssertionError
import sys, torch
capszoo.layers.FCIDPA(6, 3, 4)(torch.randn(2, 6, 4))
assert "capszoo.layers._triton.kernels" not in sys.modules, "Triton is imported where it computes"
"""


@pytest.mark.parametrize(
    "first",
    [
        "import timm, capszoo",
        "import capszoo; from timm.models import is_model; import timm",
        *(
            pytest.param(line, marks=pytest.mark.slow)
            for line in (
                "import capszoo.models, timm",
                "import importlib.util; from capszoo import *; importlib.util.find_spec('timm'); import timm",
                # imported anew, as coverage and notebooks do: the first import has left its finder
                "import sys, capszoo; [sys.modules.pop(m) for m in [*sys.modules] if 'capszoo' in m]; "
                "import capszoo, timm",
            )
        ),
    ],
)
def test_timm_knows_our_models_in_either_order(root: Path, first: str) -> None:
    code = f"{first}\nprint(timm.is_model('idpa_resnet'), timm.create_model('cnn_sabour', device='meta').num_classes)"
    done = _python(root, f"{code}\n{_EVERY_NAME}")
    assert done.returncode == 0 and done.stdout.strip() == "True 10", done.stderr


@pytest.mark.slow
def test_the_hook_leaves_timm_as_it_is(root: Path) -> None:
    code = (
        "import capszoo, sys, timm, inspect\n"
        "assert 'find_spec' in dir(timm.__spec__.loader) or 'SourceFileLoader' in repr(timm.__loader__)\n"
        "assert timm.__spec__.loader is timm.__loader__ and inspect.getsource(timm)\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('capszoo')]\n"
    )
    done = _python(root, code)
    assert done.returncode == 0, done.stderr
