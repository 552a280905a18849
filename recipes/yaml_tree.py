"""Read YAML as trees of plain values, with a limit on the size that their anchors expand to."""

from __future__ import annotations

import re
from typing import Any

import yaml

#: Maximum values of a tree, each anchor counted as often as it is used: 26 nested anchors of a kilobyte are 2**26
#: mappings.
MAX_VALUES = 100_000
MAX_TEXT = 4 * 2**20
#: Maximum depth of a tree.
MAX_DEPTH = 64


class YamlError(ValueError):
    """Not YAML of plain values; the message is one line, and states the line number if it is known."""


#: libyaml's, if PyYAML was built with it, ten times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Numbers as in YAML 1.2. PyYAML reads YAML 1.1, where ``010`` is 8, ``1:30`` is 90, and ``1e-8`` is a string."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in kinds if tag not in (_INT, _FLOAT)]
        for first, kinds in _SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_integer(self, node: Any) -> int:
        text = self.construct_scalar(node).replace("_", "")
        base = {"0x": 16, "0o": 8}.get(text.lstrip("+-")[:2].lower(), 10)
        return int(text, base)


_Loader.add_constructor(_INT, _Loader.construct_integer)
# `08` stays a text, which PyYAML writes without quotes
_Loader.add_implicit_resolver(
    _INT,
    re.compile(r"[-+]?(0x[0-9a-fA-F]+|0o[0-7]+|0[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"([-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> Any:
    """Read YAML into mappings, lists and plain values.

    Raises:
        YamlError: not valid, too large, nested too deep, or a value does not match its tag.
    """
    if len(text) > MAX_TEXT:
        raise YamlError(f"larger than {MAX_TEXT // 2**20} MiB")
    try:
        _check_depth(text)  # before building a tree, whose time is quadratic in its depth
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count(node, {}, ())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise YamlError(f"{line}not valid YAML ({' '.join(str(problem).split())[:200]})") from error
    except YamlError:
        raise
    except RecursionError as error:
        raise YamlError(f"nested deeper than {MAX_DEPTH} levels") from error
    except Exception as error:  # of constructors: `!!int x`, `2020-99-99`, 5,000 digits, an unhashable key, …
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise YamlError(f"a value that YAML cannot read ({reason})") from error


def _check_depth(text: str) -> None:
    """Raise YamlError if brackets or indentation open more than MAX_DEPTH levels."""
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise YamlError(f"line {event.start_mark.line + 1}: nested deeper than {MAX_DEPTH} levels")


def _count(node: Any, counts: dict[int, int], above: tuple[int, ...]) -> int:
    """Values below a node, anchors expanded."""
    if id(node) in above:
        raise YamlError(f"line {node.start_mark.line + 1}: an anchor that holds itself")
    if id(node) not in counts:
        below: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            below = [part for pair in node.value for part in pair]
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                    continue
                if key.value in keys:
                    raise YamlError(f"line {key.start_mark.line + 1}: '{key.value[:100]}' is stated twice")
                keys.add(key.value)
        elif isinstance(node, yaml.SequenceNode):
            below = list(node.value)
        total = 1 + sum(_count(part, counts, (*above, id(node))) for part in below)
        if total > MAX_VALUES:
            raise YamlError(
                f"line {node.start_mark.line + 1}: anchors that expand to more than {MAX_VALUES:,} values"
            )
        counts[id(node)] = total
    return counts[id(node)]
