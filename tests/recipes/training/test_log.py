"""Lines about an epoch."""

import json

import pytest

from capszoo.recipes.training.log import RunLog, setback_line

BEFORE = {"epoch": 1, "step": 10, "train_loss": 1.5, "train_top1": 58.0}


@pytest.mark.parametrize(
    "loss, top1, more, told",
    [
        (3.2, 26.0, {}, True),
        (1.6, 26.0, {}, False),  # another loss than accuracy
        (3.2, 57.0, {}, False),  # a margin that rises
        (None, 26.0, {}, False),
        (3.2, 26.0, {"size": 32}, False),  # the first epoch of a stage
    ],
)
def test_an_epoch_that_loses_what_was_learned(loss, top1, more, told) -> None:
    record = {**BEFORE, "epoch": 2, "step": 20, "train_loss": loss, "train_top1": top1, **more}
    line = setback_line(record, BEFORE)
    assert bool(line) == told
    if line:
        assert "from 1.5 to 3.2" in line and "clip_grad" in line
    assert setback_line(record, None) is None


def test_the_record_before(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(BEFORE) + "\n", encoding="utf-8")
    log = RunLog(tmp_path, True, total=20, done=10)
    record = {**BEFORE, "epoch": 2, "step": 20}
    log.epoch(record)
    assert log.before(record) == BEFORE and log.before(BEFORE) is None
    log.close()
