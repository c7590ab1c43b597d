"""A record that crashes the process becomes a dead letter; every other record is trained."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamlearn.errors import Reason
from streamlearn.snapshot.store import SnapshotStore
from tests.crash.killers import MAGIC, MAGIC_TOKEN
from tests.doubles import tiny_backbone
from tests.variants import variants

GOOD = 21
CRASHING = {
    "decoding": {"prompt": MAGIC.decode(), "completion": " no"},
    "training": {"input_ids": [9, MAGIC_TOKEN, 9, 8]},
}


@pytest.mark.parametrize("where", variants(CRASHING.keys(), short=["training"]))
def test_a_record_that_crashes_the_process_is_dead_lettered_after_three_crashes(tmp_path: Path, where: str) -> None:
    """Three processes end with the same signal; the fourth learns all other records and writes one dead letter."""
    rows: list[Any] = [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(GOOD)]
    rows.insert(13, CRASHING[where])
    (tmp_path / "backbone").mkdir()
    (tmp_path / "stream.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    config = {
        "state": str(tmp_path / "state"),
        "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl")}},
        "stream": {"max_tokens": 32, "batch_tokens": 128, "batch_records": 4},
        "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "holdout": {"every_records": 0},
        "snapshot": {"every_records": 8},
    }
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killers", str(tmp_path / "config.json"), where],
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert orjson.loads(done.stdout) == [-signal.SIGABRT] * 3 + [0], done.stderr.decode()[-3000:]
    newest = SnapshotStore(tmp_path / "state" / "snapshots", keep=9).newest()
    assert newest is not None
    assert [row[2:] for row in newest.manifest.ledger] == [(GOOD, 1, 0)]
    assert newest.manifest.components["run"]["reasons"] == {Reason.KILLED_PROCESS: 1}
    assert orjson.loads((tmp_path / "state" / "crashes.json").read_bytes())["given_up"] == []
