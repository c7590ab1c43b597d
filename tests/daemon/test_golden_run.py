"""A run that an earlier build of this format began is read completely, and continues.

To write the golden run again, for a new format only: python -m tests.daemon.test_golden_run
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file

from streamlearn.daemon.build import Components
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import STATE, dump_components
from tests.daemon.test_daemon import daemon_of, opened
from tests.doubles import tiny_backbone

GOLDEN = Path(__file__).parent / "golden" / "format-3"
BACKBONE = "./backbone"
"""Relative, so that the snapshot names no folder of the machine that wrote it."""
STEP, PER_BATCH = 20, 4
WORDS = ["fox", "dog", "cat", "owl", "hen"]


def lines(num_steps: int) -> list[bytes]:
    """Two tasks, half of the golden run each, with one unusable record, and then the first again."""
    rows = [
        {"prompt": f"the {WORDS[i % 5]} says", "completion": f" {WORDS[i % 3]}"}
        if i < 44 or i >= 88
        else {"prompt": f"{i % 7} + {i % 4} =", "completion": f" {i % 7 + i % 4}"}
        for i in range(PER_BATCH * num_steps)
    ]
    return [*map(orjson.dumps, rows[:10]), b"{not json", *map(orjson.dumps, rows[10:])]


def settings(folder: Path, records: list[bytes]) -> Settings:
    """The run's configuration; the current directory must be `folder`."""
    tiny_backbone(folder / BACKBONE)
    (folder / "stream.jsonl").write_bytes(b"\n".join(records) + b"\n")
    return Settings.model_validate(
        {
            "state": folder / "state",
            "source": {"jsonl": {"path": folder / "stream.jsonl"}},
            "stream": {"max_tokens": 32, "batch_tokens": 32 * PER_BATCH, "batch_records": PER_BATCH},
            "backbone": {"model": BACKBONE, "dtype": "float32"},
            "adapter": {"num_heads": 4, "rank": 1},
            "shift": {"lookahead_records": 8, "max_regimes": 4},
            "holdout": {"every_records": 10},
            "snapshot": {"every_records": 40},
        }
    )


@pytest.fixture
def components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Components]:
    """The golden run, opened with a longer stream."""
    state = tmp_path / "state"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, state)
    manifest = orjson.loads((state / "snapshots" / f"{STEP:08d}" / "manifest.json").read_bytes())
    # The backbone is made again; the last bits of its random weights may depend on the version of torch.
    monkeypatch.setattr("streamlearn.backbone.load.digest", lambda *_: manifest["backbone"]["digest"])
    with opened(settings(tmp_path, lines(STEP + 8)), accept_config_change=True) as components:
        yield components


def test_every_saved_value_is_read_and_the_run_continues_with_its_regimes(components: Components) -> None:
    saved = load_file(GOLDEN / "snapshots" / f"{STEP:08d}" / STATE)
    read, _ = dump_components({"regimes": components.adaptation.save()})
    of_regimes = [name for name in saved if name.startswith("regimes.")]
    assert len(of_regimes) > 50
    assert [name for name in of_regimes if not torch.equal(saved[name], read[name])] == []
    assert (components.learner.number, components.state.records) == (STEP, STEP * PER_BATCH + 1)
    assert [report.shift.onset for report in components.adaptation.state.reports] == [1, 45]

    daemon = daemon_of(components)
    daemon.run()
    assert daemon.state.records == len(lines(STEP + 8))
    assert components.adaptation.state.reports[-1].shift.known


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        with opened(settings(Path(name), lines(STEP))) as run:
            daemon_of(run).run()
        shutil.rmtree(GOLDEN, ignore_errors=True)
        GOLDEN.mkdir(parents=True)
        newest = sorted((Path(name) / "state" / "snapshots").iterdir())[-1]
        shutil.copytree(newest, GOLDEN / "snapshots" / newest.name)
        shutil.copy(Path(name) / "state" / "dead_letters.jsonl", GOLDEN)
