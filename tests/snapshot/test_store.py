"""The snapshot store: saving, finding, pruning and moving aside."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from streamlearn.errors import SnapshotDamagedError, SnapshotError, SnapshotMismatchError
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.parts import adapter_part, state_part
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.record import Position, TopicPartition

from .kit import adapter, assert_is, draft, save, tensors


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep=2)


def damage(store: SnapshotStore, name: str) -> None:
    path = store.folder / name / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_the_newest_snapshot_is_read_back_completely(store: SnapshotStore) -> None:
    assert store.newest() is None
    save(store, 7)
    info = save(store, 12)
    assert_is(store.newest(), 12)
    assert (info.name, info.step, info.position) == ("00000012", 12, draft(12).position)
    assert [found.name for found in store.infos()] == ["00000007", "00000012"]
    assert store.infos()[-1] == info


def test_a_snapshot_that_is_pruned_while_they_are_listed_is_left_out(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop prunes while HTTP lists."""
    save(store, 7)
    monkeypatch.setattr(store, "names", lambda: ["00000003", "00000007"])
    assert [found.name for found in store.infos()] == ["00000007"]


def test_steps_beyond_eight_digits_stay_in_order(store: SnapshotStore) -> None:
    for step in (99_999_999, 100_000_000):
        save(store, step)
    assert store.names() == ["99999999", "100000000"]
    assert_is(store.newest(), 100_000_000)


def test_tensors_are_read_back_bit_for_bit_in_every_dtype_and_layout(store: SnapshotStore) -> None:
    """bfloat16, NaN payloads, scalars, empty and strided tensors, and shared memory."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 3), generator=generator).to(torch.int16)
    whole = torch.randn(4, 6, generator=generator)
    state = {
        "bf16": bits.view(torch.bfloat16),
        "f16": bits.view(torch.float16),
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "strided": whole.T,
        "slice": torch.arange(10.0)[2:5],
        "flags": torch.tensor([True, False]),
    }
    store.save(draft(1), [adapter_part(adapter(1)), state_part(state)])
    snapshot = store.newest()
    assert snapshot is not None
    found = snapshot.tensors()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        flat = tensor.contiguous().flatten()
        assert torch.equal(found[name].flatten().view(torch.uint8), flat.view(torch.uint8)), name


def test_tensors_in_memory_do_not_depend_on_the_file(store: SnapshotStore) -> None:
    """A pruned or damaged file cannot crash a process that uses its tensors."""
    save(store, 1)
    snapshot = store.newest()
    assert snapshot is not None
    found = snapshot.tensors()
    os.truncate(snapshot.path / "state.safetensors", 0)
    assert torch.equal(found["exp_avg"], tensors(1)["exp_avg"])


def test_the_same_state_is_saved_once(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM right after a snapshot writes nothing, whatever the time is."""
    first = save(store, 3)
    monkeypatch.setattr(Files, "write", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(Files, "make_folder", lambda *_: pytest.fail("made"))
    assert save(store, 3, created_at="2030-01-01T00:00:00+00:00") == first


def test_a_later_position_of_the_same_step_replaces_it(store: SnapshotStore) -> None:
    """Dead letters move the position without a step; a restart must not read these records again."""
    save(store, 3)
    later = Position({TopicPartition("orders", 0): 99})
    assert save(store, 3, position=later).position == later
    snapshot = store.newest()
    assert snapshot is not None
    assert snapshot.manifest.position == later
    assert [path.name for path in store.folder.iterdir()] == ["00000003"]


def test_a_snapshot_is_restored_after_an_incomplete_replacement(store: SnapshotStore) -> None:
    save(store, 3)
    (store.folder / "00000003").rename(store.folder / ".replaced-00000003")
    assert_is(store.newest(), 3)


def test_incomplete_folders_of_a_crashed_process_are_removed(store: SnapshotStore) -> None:
    save(store, 3)
    for name in (".staging-00000004", ".pruned-00000001"):
        (store.folder / name / "adapter").mkdir(parents=True)
    assert_is(store.newest(), 3)
    assert [path.name for path in store.folder.iterdir()] == ["00000003"]


def test_a_damaged_snapshot_is_moved_aside_and_the_previous_one_used(store: SnapshotStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    damage(store, "00000003")
    damage(store, "00000002")
    with capture_logs() as events:
        assert_is(store.newest(), 1)
    assert [(event["event"], event["snapshot"]) for event in events] == [
        ("snapshot_damaged", "00000003"),
        ("snapshot_damaged", "00000002"),
    ]
    assert "state.safetensors must have SHA-256" in events[0]["fault"]
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000001", "damaged-00000002", "damaged-00000003"]
    save(store, 3)
    assert_is(store.newest(), 3)


def test_without_a_valid_snapshot_there_is_no_fresh_start(store: SnapshotStore) -> None:
    """A supervisor that restarts the daemon gets the same error again, and nothing is moved."""
    save(store, 1)
    damage(store, "00000001")
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"found only damaged ones.*--fresh"):
            store.newest()
    assert store.names() == ["00000001"]
    (store.folder / "00000001").rename(store.folder / "damaged-00000001")
    with pytest.raises(SnapshotError, match="moved aside"):
        store.newest()


def test_an_unreadable_folder_is_not_treated_as_empty(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file")
    with pytest.raises(SnapshotError, match="must be readable"):
        SnapshotStore(tmp_path / "snapshots", keep=2).newest()


def test_an_error_of_the_process_moves_nothing_aside(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files are not a fault of the snapshot."""
    save(store, 1)
    save(store, 2)

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("streamlearn.snapshot.files.os.open", refuse)
        with pytest.raises(SnapshotError, match="Too many open files") as caught:
            store.newest()
    assert not isinstance(caught.value, SnapshotDamagedError)
    assert store.names() == ["00000001", "00000002"]


def test_another_format_is_an_error_at_the_start_and_nothing_is_moved(store: SnapshotStore) -> None:
    save(store, 1)
    save(store, 2)
    rewrite_manifest(store.folder / "00000002", b'"version": 3', b'"version": 4')
    with pytest.raises(SnapshotMismatchError, match="format 3, found format 4"):
        store.newest()
    assert store.names() == ["00000001", "00000002"]


def rewrite_manifest(folder: Path, old: bytes, new: bytes) -> None:
    """Change a manifest and seal it again, as another release would have written it."""
    path = folder / "manifest.json"
    data = path.read_bytes()
    assert data.count(old) == 1
    blank = re.sub(rb'(?m)^(  "sha256": ")[0-9a-f]{64}', rb"\g<1>" + b"0" * 64, data.replace(old, new))
    seal = hashlib.sha256(blank).hexdigest().encode()
    path.write_bytes(re.sub(rb'(?m)^(  "sha256": ")0{64}', rb"\g<1>" + seal, blank))


def test_prune_keeps_the_newest(store: SnapshotStore) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    store.prune()
    assert store.names() == ["00000003", "00000004"]
    store.prune(keep=1)
    assert [path.name for path in store.folder.iterdir()] == ["00000004"]


def test_a_pinned_snapshot_counts_while_it_is_among_the_newest(tmp_path: Path) -> None:
    """Later it stays beside them."""
    store = SnapshotStore(tmp_path / "snapshots", keep=2, pins=lambda: {"00000003"})
    for step, kept in ((3, [3]), (4, [3, 4]), (5, [3, 4, 5]), (6, [3, 5, 6])):
        save(store, step)
        store.prune()
        assert [int(name) for name in store.names()] == kept


def test_a_failed_prune_is_logged_and_not_raised(tmp_path: Path) -> None:
    class Stuck(Files):
        def remove(self, path: Path) -> None:
            raise OSError(5, "Input/output error")

    store = SnapshotStore(tmp_path / "snapshots", keep=1, files=Stuck())
    save(store, 1)
    save(store, 2)
    with capture_logs() as events:
        store.prune()
    assert [event["event"] for event in events] == ["snapshot_prune_failed"]
    assert_is(SnapshotStore(store.folder, keep=1).newest(), 2)


def test_fresh_moves_everything_aside_and_deletes_nothing(store: SnapshotStore) -> None:
    assert store.set_aside() is None
    aside = []
    for _ in range(2):
        save(store, 5)
        aside.append(store.set_aside())
        assert store.newest() is None
    assert [path.name for path in aside if path] == ["snapshots-until-00000005", "snapshots-until-00000005-2"]
    for path in aside:
        assert path is not None
        assert_is(SnapshotStore(path, keep=2).newest(), 5)


@pytest.mark.parametrize("name", ["../etc", "1", "00000009", "000000001", "", "00000001/adapter", "٠٠٠٠٠٠٠١"])
def test_a_name_is_looked_up_and_never_joined_to_a_path(store: SnapshotStore, name: str) -> None:
    save(store, 1)
    with pytest.raises(SnapshotError, match="no snapshot"):
        store.load(name)


def test_a_header_too_large_to_be_read_is_not_written(store: SnapshotStore) -> None:
    many = {"x" * 1000 + str(number): torch.zeros(1) for number in range(8400)}
    with pytest.raises(SnapshotError, match="join small tensors"):
        store.save(draft(1), [adapter_part(adapter(1)), state_part(many)])
    assert store.newest() is None


def test_a_snapshot_holds_no_executable_content(store: SnapshotStore) -> None:
    """Only safetensors and JSON, no pickle."""
    save(store, 1)
    suffixes = {path.suffix for path in store.folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_what_an_operator_decided_replaces_the_snapshot_of_the_same_step(store: SnapshotStore) -> None:
    """Between two steps a regime may be named, frozen or dropped."""
    save(store, 3)
    assert save(store, 3, regime_changes=1, components={"scores": 1}).step == 3
    snapshot = store.newest()
    assert snapshot is not None
    assert snapshot.manifest.components == {"scores": 1}
    save(store, 3, regime_changes=1, components={"scores": 2})
    assert store.new_bytes == 0
