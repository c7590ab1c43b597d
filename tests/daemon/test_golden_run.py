"""A run that an earlier release began goes on: what it wrote is loaded to the last bit, and learning continues.

`golden/format-N` is a state folder as release 0.1.0 wrote it, with the tiny backbone, stream and configuration that it
was written with: one snapshot (step 30, in the second of two regimes) and the dead letter before it. `golden/claims` is
one whose regimes had claimed experts of one adapter; later releases give each regime an adapter of its own.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamlearn.daemon.build import Components
from streamlearn.errors import SnapshotMismatchError
from streamlearn.settings import load
from streamlearn.snapshot.manifest import FORMAT_VERSION
from tests.daemon.test_daemon import daemon_of, opened

GOLDEN = Path(__file__).parent / "golden"
FORMATS = sorted(GOLDEN.glob("format-*"))


@pytest.fixture(params=FORMATS, ids=lambda folder: folder.name)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, so that nothing happens to the original."""
    folder = shutil.copytree(request.param, tmp_path / "golden")
    return folder / "config.yaml"


def tensors_of(snapshot: Path) -> dict[str, torch.Tensor]:
    state = load_file(snapshot / "state.safetensors")
    return {**state, **load_file(snapshot / "adapter" / "adapter_model.safetensors")}


def test_every_format_that_is_read_has_a_golden_run() -> None:
    """Whoever raises FORMAT_VERSION adds one."""
    assert [folder.name for folder in FORMATS] == [f"format-{version}" for version in range(2, FORMAT_VERSION + 1)]


def test_a_snapshot_of_an_earlier_release_is_loaded_to_the_last_bit(config: Path, tmp_path: Path) -> None:
    """Saved again at once, under another step, every tensor and every count is the one that was read."""
    settings = load(config)
    with opened(settings) as components:
        before = components.store.load("00000030")
        components.learner.skip_step()  # the same state under the next step's name
        info = components.checkpoint.save(components.state)
        after = components.store.load(info.name)
        assert after.name == "00000031"
        ours, theirs = tensors_of(after.path), tensors_of(before.path)
        added_tensors = {f"regimes.monitor.regimes.{name}" for name in ("sampled", "scalars.added")}  # since 0.2.0
        assert ours.keys() - added_tensors == theirs.keys() - added_tensors
        unequal = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert unequal == ["learner.counts"]
        assert after.manifest.position == before.manifest.position
        assert after.manifest.ledger == before.manifest.ledger
        assert after.manifest.learner == before.manifest.learner
        regimes = before.manifest.components["regimes"]
        entries = [{**entry, "started_from": None, "refused_return": None} for entry in regimes["entries"]]
        for entry in entries:
            entry["shift"] = {**entry["shift"], "parent": None}  # and split no regime
        added: dict[str, Any] = {"unknown": [], "undivided": []}  # losses of answers to unknown requests; splits
        added["controls"] = {"names": {}, "frozen": {}, "num_changes": 0}  # what an operator decided
        chronicle = regimes["chronicle"]
        visits = {
            slot: {**row, "refused_return": None} for slot, row in chronicle["presences"].items()
        }  # nor refused one
        added["chronicle"] = {**chronicle, "presences": visits}
        scores = regimes["forgetting"].items()  # which held until the next step
        added["forgetting"] = {slot: {**row, "trained_at": 30, "ended": False} for slot, row in scores}
        assert after.manifest.components["regimes"] == {**regimes, "entries": entries, **added}


def test_a_run_of_an_earlier_release_goes_on(config: Path) -> None:
    """To the end of its stream: every record once, both regimes kept, no shift declared again."""
    components = Components(load(config))
    try:
        assert components.learner.number == 30
        daemon = daemon_of(components)
        daemon.run()
        ((_, _, trained, dead, held_out),) = daemon.state.ledger.rows()
        assert (trained + held_out, dead) == (180, 1)
        assert [report.shift.regime for report in components.adaptation.reports] == [1, 2]
        assert components.adaptation.statistics.status(None).num_shifts == {"inputs": 1}
        assert len((components.settings.state / "dead_letters.jsonl").read_bytes().splitlines()) == 1
        history = daemon.history.status  # that release kept none: it begins here, within the second regime
        assert history.points[0].step == 31
        assert [segment.regime for segment in history.segments] == [2]
        assert history.segments[0].last_record == history.points[-1].record == 180
    finally:
        components.close()


def test_a_run_with_claims_cannot_go_on_and_is_told_how(tmp_path: Path) -> None:
    """Its experts are shared; nothing of it is touched."""
    folder = shutil.copytree(GOLDEN / "claims", tmp_path / "claims")
    before = {path: path.read_bytes() for path in (folder / "state").rglob("*.*") if path.is_file()}
    with pytest.raises(SnapshotMismatchError, match=r"each regime now has an adapter of its own: run release 0\.2\.0"):
        Components(load(folder / "config.yaml"))
    assert all(path.read_bytes() == data for path, data in before.items())
