"""Pytest plugin under which timm's own ``tests/test_models.py`` runs, unmodified, on capszoo's models.

``scripts/test_timm.py`` (``make test-timm``) downloads that file from the source distribution of the
installed timm and starts pytest with ``-p tests.timm_plugin``. The plugin

- imports capszoo, so that its models stand in timm's registry;
- narrows ``timm.list_models`` and ``timm.list_pretrained``, which the file uses to parametrise its tests, to
  our names. The ``module`` argument, a list of timm's files whose models have ``forward_intermediates``, is
  dropped: all of ours have it;
- keeps the collected items whose ``model_name`` is ours. The others are timm's tests of its own models;
- gives every item the time limit of timm's own switch ``TIMEOUT``, in seconds: some of the file's limits do not
  read it, and are meant for a machine with more than two cores.

No test is left out for any of our models.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import timm

import capszoo

_OURS = set(capszoo.list_models())
_list_models = timm.list_models


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.split(".")[0] in _OURS


def _list_our_models(filter: Any = "", module: Any = "", *args: Any, **kwargs: Any) -> list[str]:
    return [name for name in _list_models(filter, "", *args, **kwargs) if _is_ours(name)]


def _list_our_pretrained(filter: Any = "", exclude_filters: Any = "") -> list[str]:
    return _list_our_models(filter, pretrained=True, exclude_filters=exclude_filters, include_tags=True)


timm.list_models = _list_our_models
timm.list_pretrained = _list_our_pretrained


class _Selection:
    def __init__(self) -> None:
        self.models: set[str] = set()
        self.kept = 0
        self.foreign = 0


_SELECTION = pytest.StashKey[_Selection]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection = config.stash.setdefault(_SELECTION, _Selection())
    kept, dropped = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        model = params.get("model_name")
        if not _is_ours(model):
            selection.foreign += 1
            dropped.append(item)
        else:
            selection.models.add(model.split(".")[0])
            if limit := os.environ.get("TIMEOUT"):
                item.add_marker(pytest.mark.timeout(int(limit)), append=False)
            kept.append(item)
    selection.kept = len(kept)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def _summary(selection: _Selection) -> list[str]:
    return [
        f"{selection.kept} of timm's tests on {len(selection.models)} of {len(_OURS)} capszoo models; "
        f"{selection.foreign} tests of timm's own models left out"
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """State what was run. Under xdist only the workers collect: one's selection is shown."""
    selection = config.stash.get(_SELECTION, None)
    lines = getattr(config, "_capszoo_summary", None) or (_summary(selection) if selection else [])
    if lines:
        terminalreporter.section("timm's tests on capszoo")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    selection = session.config.stash.get(_SELECTION, None)
    if output is not None and selection is not None:
        output["capszoo_summary"] = _summary(selection)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    lines = getattr(node, "workeroutput", {}).get("capszoo_summary")
    if lines:
        node.config._capszoo_summary = lines
