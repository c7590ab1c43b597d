"""The manifest: what it refuses to store and to read, and golden snapshots of released formats."""

import hashlib
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.errors import SnapshotDamagedError, SnapshotError, SnapshotMismatchError
from streamlearn.snapshot import manifest as module
from streamlearn.snapshot.manifest import FORMAT_VERSION, FileEntry, Manifest
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import Position, TopicPartition

from .kit import assert_is, draft, save

FILES = {"state.safetensors": FileEntry(bytes=3, sha256="ab" * 32)}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab\n" ', max_size=4), inner, max_size=3),
)


def sealed(values: dict[str, Any]) -> bytes:
    """A sealed manifest as another release would write it."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    blank = orjson.dumps({**values, "sha256": "0" * 64}, option=options)
    return orjson.dumps({**values, "sha256": hashlib.sha256(blank).hexdigest()}, option=options)


def values() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(Manifest.from_draft(draft(5), FILES).to_bytes())
    del found["sha256"]
    return found


@given(components=st.dictionaries(st.text("abc", max_size=3), json_values, max_size=3))
def test_a_manifest_survives_a_round_trip(components: dict[str, Any]) -> None:
    """Floats to the last bit, keys in order, any state of a component."""
    position = Position({TopicPartition("b", 1): 4, TopicPartition("a", 10): 1 << 40})
    written = Manifest.from_draft(draft(5, components=components, position=position), FILES)
    assert Manifest.from_bytes(written.to_bytes(), where="m") == written
    assert written.to_bytes() == sealed(orjson.loads(written.model_dump_json()))


def test_a_component_cannot_forge_the_seal() -> None:
    """A nested key of the same name, or a line like the seal's in a text, is content."""
    forged = {"sha256": "1" * 64, "text": '\n  "sha256": "' + "2" * 64 + '"'}
    written = Manifest.from_draft(draft(5, components=forged), FILES)
    assert Manifest.from_bytes(written.to_bytes(), where="m").components == forged


def test_a_shell_can_check_the_seal(tmp_path: Path) -> None:
    """The command in the module's docstring prints the seal."""
    data = Manifest.from_draft(draft(5), FILES).to_bytes()
    (tmp_path / "manifest.json").write_bytes(data)
    assert module.__doc__ is not None
    command = module.__doc__[module.__doc__.index("sed -E") : module.__doc__.index("sha256sum\n")] + "sha256sum"
    shown = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.split()[0] == orjson.loads(data)["sha256"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, b"bytes"])
def test_values_that_json_would_lose_are_refused(bad: object) -> None:
    with pytest.raises(SnapshotError, match="must hold JSON with finite numbers"):
        draft(5, components={"detector": [0, {"mean": bad}]})


def test_text_that_is_not_utf8_is_a_snapshot_error() -> None:
    with pytest.raises(SnapshotError, match="step 5 cannot be written as JSON"):
        Manifest.from_draft(draft(5, components={"x": "\ud800"}), FILES).to_bytes()


def test_a_manifest_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    with pytest.raises(SnapshotError, match="must have at most 500 bytes"):
        Manifest.from_draft(draft(5), FILES).to_bytes()


@pytest.mark.parametrize("version", [0, 4, "3", None])
def test_another_format_is_named_with_the_release_that_wrote_it(version: object) -> None:
    message = rf"of format 3, found format {version}: run the release that wrote it \(streamlearn 0\.1\.0\)"
    with pytest.raises(SnapshotMismatchError, match=message):
        Manifest.from_bytes(sealed({**values(), "version": version}), where="m")


def test_a_ledger_without_the_column_of_ignored_records_has_none() -> None:
    """As snapshots were written before they were counted."""
    older = Manifest.from_bytes(sealed({**values(), "ledger": [["orders", 0, 20, 3, 1]]}), where="m")
    assert older.ledger == (("orders", 0, 20, 3, 1, 0),)
    assert older.ledger[0].ignored == 0


def test_unknown_and_missing_keys_are_named() -> None:
    with pytest.raises(SnapshotMismatchError, match="surprise: Extra inputs"):
        Manifest.from_bytes(sealed({**values(), "surprise": 1}), where="m")
    lacking = {key: value for key, value in values().items() if key != "ledger"}
    with pytest.raises(SnapshotMismatchError, match="ledger: Field required"):
        Manifest.from_bytes(sealed(lacking), where="m")
    with pytest.raises(SnapshotMismatchError, match=r"position: .*expected rows of topic, partition, offset"):
        Manifest.from_bytes(sealed({**values(), "position": 3}), where="m")


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\x00" * 4096])
def test_no_seal_is_damage(data: bytes) -> None:
    with pytest.raises(SnapshotDamagedError, match="expected exactly one seal"):
        Manifest.from_bytes(data, where="m")


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
