"""The loss of the bundled backbone on task files."""

import gzip
import math
from pathlib import Path

import orjson

from benchmarks.nano import compare


def test_pretraining_lowers_the_loss(tmp_path: Path) -> None:
    """Random weights are near a uniform guess over the vocabulary of 4096."""
    row = {"id": "1", "task": "t", "definition": "Answer yes or no.", "input": "Is it a dog?", "output": "yes"}
    (tmp_path / "t.train.jsonl.gz").write_bytes(gzip.compress(orjson.dumps(row) + b"\n"))
    ((task, records, random_loss, trained_loss),) = compare(tmp_path)
    assert (task, records) == ("t", 1)
    assert abs(random_loss - math.log(4096)) < 1.5
    assert trained_loss < random_loss - 1
