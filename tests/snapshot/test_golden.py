"""Snapshots of earlier releases are read completely, or refused unchanged."""

import hashlib
import shutil
from pathlib import Path

import orjson
import pytest

from streamlearn.errors import SnapshotMismatchError
from streamlearn.snapshot.manifest import FORMAT_VERSION
from streamlearn.snapshot.store import SnapshotStore

from .kit import assert_is, draft, save

GOLDEN = Path(__file__).parent / "golden"
STEP = 3
NEWEST_SHA256 = "497fd16c5848bde2f5c9519b96705046387a5a5e51f19ed28baea25be3dee473"
"""SHA-256 of the manifest of `format-3`; the manifest holds the hashes of the other files."""


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """A copy of the snapshot in the newest format, which protects the original."""
    shutil.copytree(GOLDEN / f"format-{FORMAT_VERSION}", tmp_path / "snapshots")
    return SnapshotStore(tmp_path / "snapshots", keep=2)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite_as(version: int, store: SnapshotStore) -> None:
    """Rewrite the manifest in another format, with a matching seal."""
    path = store.folder / f"{STEP:08d}" / "manifest.json"
    values = {**orjson.loads(path.read_bytes()), "version": version, "sha256": "0" * 64, "of_tomorrow": [1]}
    blank = orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    path.write_bytes(blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1))


def test_the_golden_snapshot_is_unchanged() -> None:
    """It was not written again by newer code."""
    manifest = GOLDEN / f"format-{FORMAT_VERSION}" / f"{STEP:08d}" / "manifest.json"
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == NEWEST_SHA256


def test_a_golden_snapshot_is_read_bit_for_bit(store: SnapshotStore) -> None:
    """In manifest, tensors and adapter."""
    before = contents(store.folder)
    assert_is(store.newest(), STEP)
    found = store.verify(f"{STEP:08d}")
    expected = draft(STEP)
    assert {key: getattr(found, key) for key in type(expected).model_fields} == dict(expected)
    assert contents(store.folder) == before


def test_a_run_continues_from_a_golden_snapshot(store: SnapshotStore) -> None:
    """The next snapshot is written beside it."""
    save(store, STEP + 1)
    assert store.names() == [f"{STEP:08d}", f"{STEP + 1:08d}"]
    assert_is(store.newest(), STEP + 1)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 99])
def test_a_newer_format_is_refused_and_left_alone(store: SnapshotStore, version: int) -> None:
    """It is intact, so it is not moved aside; the message names both formats and what to do."""
    rewrite_as(version, store)
    assert_refused(store, rf"of format {FORMAT_VERSION}, found format {version}: run the release that wrote it")


def test_a_snapshot_of_release_0_1_is_refused_and_left_alone(tmp_path: Path) -> None:
    """The message names the release that reads it."""
    shutil.copytree(GOLDEN / "format-2", tmp_path / "snapshots")
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    assert_refused(store, r"of format 3, found format 2: run release 0\.1, which reads it, or start over with --fresh")


def assert_refused(store: SnapshotStore, message: str) -> None:
    before = contents(store.folder)
    for read in (store.newest, store.infos, lambda: store.load(f"{STEP:08d}")):
        with pytest.raises(SnapshotMismatchError, match=message):
            read()
    assert contents(store.folder) == before
