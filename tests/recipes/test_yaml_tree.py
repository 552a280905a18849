"""Recipes as YAML: anchors that expand to millions, tags that lie, trees that hold themselves; each one clear line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from capszoo.recipes import yaml_tree
from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.yaml_tree import YamlError, read_yaml
from tests.support.errors import refuses

BOMB = "a0: &m0 {x: 1, y: 2}\n" + "".join(
    f"a{k}: &m{k} {{a: *m{k - 1}, b: *m{k - 1}}}\n" for k in range(1, 27)
)


def test_plain_trees() -> None:
    tree = {"a": {"b": 1}, "c": {"b": 1}, "d": [1, 2.5, True, None, "text"]}
    assert read_yaml("a: &x {b: 1}\nc: *x\nd: [1, 2.5, true, null, text]") == tree
    # numbers with an exponent are those of YAML 1.2; without one nothing changes
    for value in (1e-8, 2e3, -1.5e-4, 0.5e2, 1e6):
        assert read_yaml(f"a: {value:e}")["a"] == value
    assert read_yaml("[1e-8, 1E+3, -2e4, 1.e2]") == [1e-8, 1e3, -2e4, 1e2]
    assert read_yaml("[08, 1_0, 1e, e5, 1e5x, 1.2.3]") == ["08", 10, "1e", "e5", "1e5x", "1.2.3"]
    # in YAML 1.1 these are 8, 90, 90.5 and 5
    assert read_yaml("[010, 1:30, 1:30.5, 0b101]") == [10, "1:30", "1:30.5", "0b101"]
    assert read_yaml("[-017, +3, 0x1F, 0o17, 0, -0, 1.5]") == [-17, 3, 31, 15, 0, 0, 1.5]
    assert read_yaml("-.inf") == float("-inf")
    assert read_yaml("") is None and read_yaml("5") == 5


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "[" * 3000,
        "a: &a [*a]",
        "a: &a {b: *a}",
        "seed: !!int x",
        "seed: !!bool x",
        "seed: !!timestamp x",
        "seed: !!float x",
        "seed: !!binary \u00e9",
        "day: 2020-99-99",
        "seed: " + "9" * 5000,
        "? [a]\n: 1",
        "? {a: 1}\n: 1",
        "a: !!python/object/apply:os.system [true]",
        "a: b: c",
        "a: \x00",
        "x" * (4 * 2**20 + 1),
        "--- 1\n--- 2",
        "<<: 5",
    ],
    ids=lambda text: text[:24].encode("unicode_escape").decode(),
)
def test_what_is_refused_is_one_line(text: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(YamlError) as e:
        read_yaml(text)
    assert "\n" not in str(e.value) and 0 < len(str(e.value)) < 400
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match="r.yaml, "):
        load_recipe(path)
    assert time.monotonic() - start < 5


def test_a_key_that_stands_twice() -> None:
    with refuses(YamlError, names=["epochs", "3"]):
        read_yaml("epochs: 20\nlr: 0.1\nepochs: 2\n")
    with refuses(YamlError, names=["b", "4"]):
        read_yaml("? [a]\n: 1\nb: 2\nb: 3\n")
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [{x: 1}, {x: 2}]") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 2}],
    }


def test_set_takes_plain_values_alone() -> None:
    for text in ("!!int x", "2020-99-99", "[" * 3000, "&a [*a]"):
        with refuses(RecipeError, names=["--set", "seed", "YAML"]):
            load_recipe("idpa_cnn.mnist", [f"seed={text}"])


def test_keys_are_compared_in_linear_time() -> None:
    compared = 0

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    def scalar(value: str) -> yaml.ScalarNode:
        return yaml.ScalarNode("tag:yaml.org,2002:str", value)

    keys = [scalar(Key(f"key {k}")) for k in range(2000)]
    node = yaml.MappingNode("tag:yaml.org,2002:map", [(key, scalar("")) for key in keys])
    assert yaml_tree._count(node, {}, ()) == 4001 and compared < 10_000
