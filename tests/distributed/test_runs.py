"""The daemon as torchrun starts it."""

from pathlib import Path

import orjson
import pytest

from tests.distributed.process import TIMEOUT_S, RanksProcess
from tests.doubles import tiny_backbone

RECORDS, PER_BATCH = 480, 8


@pytest.fixture
def daemon(tmp_path: Path) -> RanksProcess:
    """A daemon that follows a file and writes a snapshot every ten steps."""
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    rows = [{"prompt": f"say {number % 50}?", "completion": f" {number % 7}"} for number in range(RECORDS)]
    (tmp_path / "stream.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return RanksProcess(
        tmp_path / "daemon",
        {
            "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl"), "follow": True}},
            "stream": {"max_tokens": 64, "batch_tokens": 64 * PER_BATCH, "batch_records": PER_BATCH, "linger_s": 1.0},
            "backbone": {"model": str(tiny_backbone(backbone)), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "snapshot": {"every_records": 10 * PER_BATCH},
            "serve": {"port": 0},
            "log": {"style": "json"},
        },
    )


def test_a_snapshot_of_two_processes_is_continued_by_one_and_by_two_again(daemon: RanksProcess) -> None:
    """Each record is trained on or held out once, whoever was stopped or killed. torchrun starts the first run."""
    daemon.start()
    daemon.wait_until(lambda: daemon.journalled_step() > 10, "some steps")
    assert daemon.terminate() == 0, daemon.log.read_text()[-3000:]
    daemon.start_forked(1)
    daemon.wait_until(lambda: daemon.journalled_step() > 20, "some steps")
    assert daemon.terminate() == 0, daemon.log.read_text()[-3000:]
    daemon.start_forked(2)
    daemon.wait_until(lambda: daemon.journalled_step() > 30, "some steps")
    daemon.kill(rank=1)
    assert daemon.seconds_to_end[0] < TIMEOUT_S
    daemon.config.write_text(daemon.config.read_text().replace("follow: true", "follow: false"))
    daemon.start_forked(2)
    assert daemon.wait() == 0, daemon.log.read_text()[-3000:]
    assert daemon.newest().ledger() == {0: (RECORDS, 0, RECORDS)}


def test_a_configuration_error_is_the_leaders(daemon: RanksProcess) -> None:
    """It is reported once, and the others end too."""
    daemon.config.write_text(daemon.config.read_text().replace("num_heads: 4", "num_heads: 5"))
    daemon.start_forked(2)
    assert daemon.wait() == 78
    daemon.wait_for_all()
    output = daemon.log.read_text()
    assert output.count('"message":"adapter.num_heads') == 1, output


@pytest.mark.long
def test_one_process_has_nothing_to_divide(daemon: RanksProcess) -> None:
    """`backbone.shard` without torchrun is an error that says so."""
    daemon.config.write_text(daemon.config.read_text().replace("dtype: float32", "dtype: float32\n  shard: true"))
    daemon.size = 1
    daemon.start()
    assert daemon.wait() == 78
    assert "torchrun" in daemon.log.read_text()
