"""What is installed, what importing costs, and which way imports run."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

#: Folder on disk -> where it is installed.
PACKAGE_ROOTS = {"capszoo": "capszoo", "recipes": "capszoo.recipes", "export": "capszoo.export"}

#: Never imported by ``import capszoo``: optional, or slow to load.
OPTIONAL = (
    "onnx onnxruntime onnxscript tensorrt matplotlib captum accelerate datasets pyarrow tensorboard gradio fastapi "
    "uvicorn ray webdataset"
).split()


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name (as installed) and file of every module."""
    for folder, package in PACKAGE_ROOTS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            parts = (package, *inner)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _run(cwd: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, with the variables of this one unless others are given."""
    command = [sys.executable, "-c", code]
    env = environment or None
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def test_package_list_matches_the_disk(root: Path) -> None:
    settings = _project(root)["tool"]["setuptools"]
    assert set(settings["packages"]) == {name for name, path in _modules(root) if path.name == "__init__.py"}
    assert settings["package-dir"] == {to: folder for folder, to in PACKAGE_ROOTS.items() if folder != to}
    for _, path in _modules(root):
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


#: the weights that a test loads from the wheel
LOADED = "resnet20_routingcaps.mnist"


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources (a build writes into its source folder), with large weights in their folder."""
    source = tmp_path_factory.mktemp("source")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")

    def without_weights(file: str, to: str) -> None:
        """60 MB of weights take seconds to pack: those that no test loads become small files."""
        if file.endswith(".safetensors") and LOADED not in file:
            Path(to).write_bytes(b"weights")
        else:
            shutil.copy2(file, to)

    for folder in PACKAGE_ROOTS:
        shutil.copytree(root / folder, source / folder, ignore=junk, copy_function=without_weights)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(root / name, source / name)
    (source / "tests").mkdir()
    shutil.copy(root / "tests" / "test_losses.py", source / "tests")
    (source / "weights-large").mkdir()
    (source / "weights-large" / "large.net.safetensors").write_bytes(b"too large for a wheel")
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("capszoo-*.whl")
    return built


def test_wheel_holds_everything_inside_the_package(root: Path, wheel: Path) -> None:
    import capszoo

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert f"\nVersion: {capszoo.__version__}\n" in archive.read(metadata).decode()
        assert "capszoo = capszoo.cli:main" in archive.read(entry_points).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"capszoo"}

    expected = {name.replace(".", "/") for name, _ in _modules(root)}
    installed = {name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py")}
    assert installed == expected

    for pattern in _project(root)["tool"]["setuptools"]["package-data"]["capszoo"]:
        found = list((root / "capszoo").glob(pattern))
        assert found, pattern
        for path in found:
            assert f"capszoo/{path.relative_to(root / 'capszoo').as_posix()}" in names
    for path in (root / "recipes" / "configs").glob("*.yaml"):
        assert f"capszoo/recipes/configs/{path.name}" in names
    assert any(name.endswith(".safetensors") for name in names), "the wheel carries no weights"


def test_source_archive_holds_the_weights_but_for_large_ones(
    root: Path, source: Path, wheel: Path, tmp_path: Path
) -> None:
    """After the wheel, as both are built in the same folder."""
    done = _run(source, f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("capszoo-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for path in (root / "capszoo" / "weights").glob("*"):
        assert f"capszoo/weights/{path.name}" in names
    assert {"pyproject.toml", "recipes/publish.py", "export/bundle/write.py"} <= names
    assert not any(name.startswith("tests/") for name in names), "they need files that an archive lacks"
    with zipfile.ZipFile(wheel) as built:
        names |= set(built.namelist())
    assert not any("weights-large" in name or "large.net" in name for name in names)


@pytest.mark.slow
def test_an_editable_install_works_from_the_folder_above(root: Path, tmp_path: Path) -> None:
    """There the checkout's own folder, `capszoo/` without `__init__.py`, looks like a namespace package."""
    source, site = tmp_path / "capszoo", tmp_path / "site"
    source.mkdir()
    for folder in PACKAGE_ROOTS:
        (source / folder).symlink_to(root / folder)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "hubconf.py"):
        shutil.copy(root / name, source / name)
    site.mkdir()
    done = _run(source, f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(site)
    code = (
        "import site, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path = [p for p in sys.path if p != {str(root)!r}]\n"
        f"site.addsitedir({str(site)!r})\n"
        "import capszoo, capszoo.recipes, capszoo.export\n"
        "print(capszoo.create_model.__name__, capszoo.__path__)\n"
    )
    done = _run(tmp_path, code, **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    assert done.returncode == 0 and done.stdout.startswith("create_model "), done.stderr
    assert str(source) in done.stdout


def test_doctor_knows_the_extras(root: Path) -> None:
    from capszoo.cli.doctor import EXTRAS

    extras = _project(root)["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"all", "docs", "dev"}, "those are for nobody's commands"
    modules = {"pyyaml": "yaml", "ray[data]": "ray", "torch-tensorrt": "torch_tensorrt"}
    modules["adversarial-robustness-toolbox"] = "art"
    for name, (needed, _) in EXTRAS.items():
        own = [re.split("[><=; ]", one)[0] for one in extras[name] if not one.startswith("capszoo")]
        assert {modules.get(one, one) for one in own} <= set(needed), name
    assert extras["all"] == ["capszoo[explain,train,export]"]


def test_wheel_works_installed_and_offline(root: Path, wheel: Path, tmp_path: Path) -> None:
    """Unpacked wheel alone on the path: registry, bundled weights and the moved packages are there."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path = [{str(tmp_path)!r}] + [p for p in sys.path if p]
import capszoo, torch
assert capszoo.__file__.startswith({str(tmp_path)!r}), capszoo.__file__
model = capszoo.create_model("resnet20_routingcaps", pretrained=True).eval()
assert torch.isfinite(model(torch.zeros(1, model.in_chans, *model.img_size))).all()
import capszoo.recipes, capszoo.export
assert capszoo.recipes.__file__.startswith({str(tmp_path)!r})
assert capszoo.export.__file__.startswith({str(tmp_path)!r})
from capszoo.errors import install_hint
print(install_hint("export"))
sys.argv = ["capszoo", "list", "--pretrained", "--json"]
from capszoo.cli import main
main()
"""
    done = _run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    hint, _, listed = done.stdout.partition("\n")
    assert hint == "pip install 'capszoo[export]'", "there is no checkout"
    absent = {row["name"] for row in json.loads(listed) if not row["installed"]}
    held = {path.stem for path in (tmp_path / "capszoo" / "weights").glob("*.safetensors")}
    large = {path.stem for path in (root / "weights-large").glob("*.safetensors")}
    assert LOADED in held and absent >= large and not absent & held
    page = (root / "docs" / "models.md").read_text()
    named = page[page.index("The weights of `") : page.index("`weights-large/`")]
    assert set(re.findall(r"`(\w+)[.`]", named)) == {name.partition(".")[0] for name in large}


def test_import_leaves_optional_libraries_alone(root: Path) -> None:
    slow = (*OPTIONAL, "pydantic", "torch", "torchvision", "timm", "numpy", "huggingface_hub")
    done = _run(root, f"import sys, capszoo; print([m for m in {slow!r} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"import capszoo pulls in {done.stdout.strip()}"


def test_every_module_imports_without_optional_libraries(root: Path) -> None:
    """Every one; those that are of no use without an extra may end in an error that names it instead."""
    names = [name for name, path in _modules(root) if path.name != "__main__.py"]
    code = f"""
import importlib, sys
for library in {OPTIONAL!r}:
    sys.modules[library] = None  # makes an import raise ModuleNotFoundError
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert name.startswith("capszoo.recipes.") and "-e '.[train]'" in str(error), (name, error)
"""
    done = _run(root, code)
    assert done.returncode == 0, done.stderr


def test_every_extra_that_a_message_names_exists(root: Path) -> None:
    """Of the calls of `require` and `install_hint`, which write the messages."""
    extras = _project(root)["project"]["optional-dependencies"]
    position, named = {"require": 2, "install_hint": 0}, set()
    for _, path in _modules(root):
        if path.name == "errors.py":  # it defines both
            continue
        assert "pip install 'capszoo[" not in path.read_text(encoding="utf-8"), "no package index has capszoo"
        for call in ast.walk(_parsed(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) in position:
                named.add(ast.literal_eval(call.args[position[call.func.id]]))  # type: ignore[attr-defined]
    assert {"explain", "export", "tensorrt", "train"} <= named <= extras.keys()


@pytest.mark.parametrize("folder", ["recipes", "export"])
def test_moved_packages_refuse_their_bare_names(root: Path, folder: str) -> None:
    done = _run(root, f"import {folder}")
    assert done.returncode != 0
    assert f"capszoo.{folder}" in done.stderr, "the message does not say what to import instead"


def test_checkout_runs_uninstalled(root: Path, tmp_path: Path) -> None:
    """``python -m capszoo`` from elsewhere, with nothing but the checkout on PYTHONPATH."""
    code = (
        "import runpy, sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(root)!r}); sys.argv = ['capszoo', 'train', '--help']; "
        "runpy.run_module('capszoo', run_name='__main__')"
    )
    done = _run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "recipe" in done.stdout.lower()


# -- imports run one way ------------------------------------------------------------------------------------------

#: The rooms of the package, from the ground up: the files and folders of capszoo/, recipes/ and export/. A room imports
#: rooms of lower floors alone.
FLOORS = (
    ("layers", "errors", "_version"),
    ("_utils", "losses", "metadata"),
    ("__init__", "_pretrained", "images"),
    ("models", "data", "scores", "preprocess"),
    ("checkpoint",),
    ("summary", "inference"),
    ("explain", "export", "ray_predict"),
    ("recipes", "app", "facade"),
    ("cli",),
    ("__main__",),
)


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, at any depth of its code, with their lines; relative ones resolved."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def test_every_room_imports_lower_floors_alone(root: Path) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    modules = dict(_modules(root))
    assert {_room(module) for module in modules} == set(floor), "a new file or folder needs a floor"
    wrong = []
    for module, path in modules.items():
        skipped = _type_checking_only(path)
        for target, line in _imported(module, path):
            # `from capszoo import name` is the file of that name, or something of the package's own face
            known = target in modules or target.rpartition(".")[0] in modules
            if line in skipped or not known or _room(target) not in floor or _room(target) == _room(module):
                continue
            if floor[_room(target)] >= floor[_room(module)]:
                wrong.append(f"{path.relative_to(root)}:{line}: {module} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_files_at_the_top_of_the_package_are_public(root: Path) -> None:
    private = {path.name for path in (root / "capszoo").glob("_*.py")}
    assert private == {"__init__.py", "__main__.py", "_version.py"}, "a private file belongs into a room"


def test_type_checkers_know_every_public_name(root: Path) -> None:
    import capszoo

    stub = ast.parse((root / "capszoo" / "__init__.pyi").read_text(encoding="utf-8"))
    stated = {
        alias.asname: f"{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }
    assert stated == {**capszoo._DEFINED_IN, "__version__": "_version"}


def _type_checking_only(path: Path) -> set[int]:
    """Lines of imports that never run."""
    return {
        line
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id in ("TYPE_CHECKING", "_TYPE_CHECKING")
        for inner in node.body
        for line in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
    }


def test_no_circle_between_files(root: Path) -> None:
    """No file imports itself through others, at any depth of its code.

    An import of ``a.b.c`` runs ``a.b`` too, which counts unless the importing file lies in ``a.b`` itself.
    """
    modules = dict(_modules(root))
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        skipped = _type_checking_only(path)
        targets = {name for name, line in _imported(module, path) if line not in skipped}
        # `from package import name`: the name is a file, or something in the package's own __init__
        files = {t if t in modules else t.rpartition(".")[0] for t in targets} & modules.keys()
        parents = {".".join(f.split(".")[:n]) for f in files for n in range(1, f.count(".") + 1)}
        around = {p for p in parents if not f"{module}.".startswith(f"{p}.")}
        graph[module] = (files | around) - {module}

    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_layers_and_hubconf_import_torch_alone(root: Path) -> None:
    allowed = {"torch", "capszoo", "triton", *sys.stdlib_module_names}
    for module, path in _modules(root):
        if _room(module) == "layers":
            assert {name.split(".")[0] for name, _ in _imported(module, path)} <= allowed, path
    targets = {name for name, _ in _imported("hubconf", root / "hubconf.py")}
    assert [name for name in targets if name.startswith("capszoo")] == ["capszoo"]
    assert {name.split(".")[0] for name in targets} <= allowed - {"triton"} | {"timm"}


def test_docstrings_have_one_dialect(root: Path) -> None:
    """Code in double backticks, and what a constant or an attribute is in a ``#:`` comment before it.

    A command's docstring is its help, which the terminal shows as it is.
    """
    single, wrong = re.compile(r"(?<![`:\w\\])`(?!`)[^`]+`(?![`_\w])"), []
    for _, path in _modules(root):
        for node in ast.walk(_parsed(path)):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            name, place = getattr(node, "name", "the file"), path.relative_to(root)
            if not name.endswith("_command") and single.search(ast.get_docstring(node) or ""):
                wrong.append(f"{place}: single backticks in the docstring of {name}")
            for part in node.body[1:]:
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and part.value.value != ...
                ):
                    wrong.append(f"{place}:{part.lineno}: a string after what it describes")
    assert not wrong, "\n".join(wrong)


def test_no_test_imports_the_file_of_another(root: Path) -> None:
    """What several of them use lies in tests/support, and fixtures in conftest.py."""
    for path in sorted((root / "tests").rglob("*.py")):
        borrowed = re.findall(
            r"^\s*from \S*\b(?:test_\w+|conftest) import|^\s*from \S+ import test_", path.read_text(), re.M
        )
        assert not borrowed, f"{path.relative_to(root)}: {borrowed}"


# -- setting up ----------------------------------------------------------------------------------------------------


def test_setup_says_where_python_is_missing(root: Path, tmp_path: Path) -> None:
    command = ["sh", "scripts/setup_venv.sh", "no-such-python3", str(tmp_path / "venv")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no-such-python3 was not found") and done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_constraints_name_versions_only(root: Path) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins and all(re.fullmatch(r'[\w.-]+==[\w.]+(; python_version >= "3\.11")?', pin) for pin in pins)
    pinned = {re.split("==", pin)[0].lower().replace("_", "-") for pin in pins}
    project = _project(root)["project"]
    wanted = [
        *project["dependencies"],
        *(r for e in ("train", "export") for r in project["optional-dependencies"][e]),
    ]
    missing = {re.split(r"[<>=!~ ]", requirement)[0].lower() for requirement in wanted} - pinned
    assert not missing, f"not pinned: {missing}"
