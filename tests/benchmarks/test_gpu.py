"""The GPU kit on a CPU: steps of every arm, outcomes of tests, the limit of a call, and the next call."""

import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from benchmarks import gpu
from benchmarks.measuring import MeasurementError, OutOfTimeError, show
from streamlearn.errors import UsageError

TESTED = """
import pytest, time
def test_holds(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="needs a GPU")
def test_is_skipped(): pass
"""


def test_every_arm_takes_steps() -> None:
    """Stock PEFT has as many parameters as `lora`, and runs in a process of its own: it changes global state."""
    rows = {arm: gpu.measure_arm("tiny", arm) for arm in gpu.SPEED_ARMS if arm != gpu.STOCK}
    rows[gpu.STOCK] = gpu.speed_of("tiny", gpu.STOCK, 300.0)
    assert all(row["tokens_per_s"] > 0 and row["share_of_peak"] > 0 and row["peak_mib"] > 0 for row in rows.values())
    assert rows["frozen_floor"]["parameters"] == 0
    assert rows[gpu.STOCK]["parameters"] == rows["lora"]["parameters"] > 0


def test_each_test_has_an_outcome(tmp_path: Path) -> None:
    """A file that pytest cannot run is an error, and one that takes too long is killed."""
    file = tmp_path / "test_it.py"
    file.write_text(TESTED)
    found = gpu.outcomes(str(file), 120.0)
    assert found["test_holds"] == "passed"
    assert found["test_fails"].startswith("failure: assert 1 == 2")
    assert found["test_is_skipped"] == "skipped: needs a GPU"
    with pytest.raises(OutOfTimeError, match="pytest: not done after 0 s"):
        gpu.outcomes(str(file), 0.1)


def test_the_next_call_makes_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is done is kept, a failure with its error; what did not fit is named until it is made."""
    made: list[str] = []

    def speed_of(_: str, arm: str, __: float) -> gpu.Rows:
        made.append(arm)
        if arm == gpu.STOCK:
            raise MeasurementError("out of memory")
        return {"tokens_per_s": 7.0}

    def no_time(*_: Any) -> gpu.Rows:
        raise OutOfTimeError("tests.crash: not done after 3 s")

    monkeypatch.setattr(gpu, "speed_of", speed_of)
    monkeypatch.setattr(gpu, "outcomes", lambda *_: {"test_it[int8]": "passed"})
    monkeypatch.setattr(gpu, "crashes", no_time)
    given = Namespace(out=tmp_path / "out.json", minutes=0.1, tiny=True, data=None, backbone=None)
    assert "speed tiny lora" in gpu.measure(given)["missing"]
    assert made == []
    given.minutes = math.inf
    missing = gpu.measure(given)["missing"]
    assert missing == {"crash 1 kills": "tests.crash: not done after 3 s", "learn": "needs --data and --backbone"}
    monkeypatch.setattr(gpu, "crashes", lambda *_: {"kills": 1})
    result = gpu.measure(given)
    assert made == [*gpu.SPEED_ARMS]
    assert result == orjson.loads(given.out.read_bytes())
    assert result["speed"]["tiny stock_peft"] == {"error": "out of memory"}
    assert (result["crash"], [*result["missing"]]) == ({"1 kills": {"kills": 1}}, ["learn"])
    show(result, *gpu.tables(result), as_json=False, width=160)
    assert "test_it[int8]  passed" in capsys.readouterr().out
    given.out.write_bytes(orjson.dumps({**result, "device": "another"}))
    with pytest.raises(UsageError, match="has results of another"):
        gpu.measure(given)


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the option that runs the same code on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(UsageError, match="add --tiny"):
        gpu.main()
