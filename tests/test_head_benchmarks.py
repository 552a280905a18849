"""The benchmarks of heads: the kept results are within their aims."""

from __future__ import annotations

from benchmarks import heads
from capszoo.models._heads import HEADS


def test_the_kept_costs_are_within_their_aims() -> None:
    rows = heads.stored()["cost"]["rows"]
    assert [row["routing"] for row in rows] == list(HEADS)
    assert all(row["memory_share"] <= heads.MEMORY_AIM for row in rows)
    assert all(row["time_share"] <= heads.TIME_AIM for row in rows)


def test_the_kept_files_agree_with_pytorch() -> None:
    rows = heads.stored()["backbones"]["rows"]
    assert [row["backbone"] for row in rows] == list(heads.BACKBONES)
    assert all(row["passed"] and row["max_rel_diff"] < 1e-3 for row in rows)
