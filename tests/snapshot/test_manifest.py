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
    return dict(orjson.loads(Manifest.from_draft(draft(5), FILES).to_bytes()))


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


def test_what_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (math.nan, math.inf, b"bytes"):
        with pytest.raises(SnapshotError, match="must hold JSON with finite numbers"):
            draft(5, components={"detector": [0, {"mean": bad}]})
    with pytest.raises(SnapshotError, match="step 5 cannot be written as JSON"):
        Manifest.from_draft(draft(5, components={"x": "\ud800"}), FILES).to_bytes()
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    with pytest.raises(SnapshotError, match="must have at most 500 bytes"):
        Manifest.from_draft(draft(5), FILES).to_bytes()


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


def test_no_seal_is_damage() -> None:
    for data in (b"", b"{}", b"null", b"\x00" * 4096):
        with pytest.raises(SnapshotDamagedError, match="expected exactly one seal"):
            Manifest.from_bytes(data, where="m")


GOLDEN = Path(__file__).parent / "golden"
STEP, NAME = 3, "00000003"
NEWEST_SHA256 = "497fd16c5848bde2f5c9519b96705046387a5a5e51f19ed28baea25be3dee473"
"""SHA-256 of the manifest of `format-3`; the manifest holds the hashes of the other files."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_golden_snapshot_is_read_bit_for_bit_and_continued(tmp_path: Path) -> None:
    """Its files were not written again by newer code, and reading leaves them alone."""
    shutil.copytree(GOLDEN / f"format-{FORMAT_VERSION}", tmp_path / "snapshots")
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    before = contents(store.folder)
    assert hashlib.sha256(before[f"{NAME}/manifest.json"]).hexdigest() == NEWEST_SHA256
    assert_is(store.newest(), STEP)
    manifest, expected = store.verify(NAME), draft(STEP)
    assert {key: getattr(manifest, key) for key in type(expected).model_fields} == dict(expected)
    assert contents(store.folder) == before
    save(store, STEP + 1)
    assert_is(store.newest(), STEP + 1)


@pytest.mark.parametrize("version", [2, FORMAT_VERSION + 1, "3", None])
def test_another_format_is_refused_and_left_alone(tmp_path: Path, version: object) -> None:
    """It is intact, so it is not moved aside; the message names the release that reads it, and what to do."""
    store = SnapshotStore(tmp_path / "snapshots", keep=2)
    reads = "run the release that wrote it"
    if version == 2:
        shutil.copytree(GOLDEN / "format-2", store.folder)
        reads = r"run release 0\.1, which reads it, or start over with --fresh"
    else:
        shutil.copytree(GOLDEN / f"format-{FORMAT_VERSION}", store.folder)
        path = store.folder / NAME / "manifest.json"
        path.write_bytes(sealed({**orjson.loads(path.read_bytes()), "version": version, "of_tomorrow": [1]}))
    before = contents(store.folder)
    message = rf"of format {FORMAT_VERSION}, found format {version}: {reads}"
    for read in (store.newest, store.infos, lambda: store.load(NAME)):
        with pytest.raises(SnapshotMismatchError, match=message):
            read()
    assert contents(store.folder) == before
