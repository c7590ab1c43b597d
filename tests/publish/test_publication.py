"""What a published folder names, what is refused, and what a crash during writing leaves."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import save

from streamlearn.codec import to_arrays
from streamlearn.errors import PublicationError
from streamlearn.publish.publication import FILE, Publication, read_routing
from streamlearn.snapshot.files import Files
from tests.gateway.sample_publication import publish_sample, sample_state

VALUES: dict[str, Any] = {
    "format": 1,
    "name": "streamlearn",
    "run": "5d3c1f66",
    "sequence": 17,
    "written_at": "2026-01-31T12:00:00+00:00",
    "snapshot": "00000184",
    "backbone": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "seed": 0,
    "max_known_rejected": 0.01,
    "routing": "routing/184.safetensors",
    "tokenizer": "tokenizer",
    "regimes": [
        {"slot": 0, "number": 1, "label": None, "adapter": "streamlearn-regime-1@184-5d3c1f"},
        {"slot": 1, "number": 2, "label": "tickets", "adapter": None},
    ],
}


def refused(**changed: Any) -> str:
    """The message with which these values are refused."""
    with pytest.raises(PublicationError) as error:
        Publication.from_bytes(orjson.dumps(VALUES | changed), where="p")
    return str(error.value)


def test_the_documented_form_is_what_is_written(tmp_path: Path) -> None:
    """Field by field, in this order; times to the microsecond, floats to the last bit."""
    values = VALUES | {"written_at": "2026-01-31T12:00:00.000001+00:00", "max_known_rejected": 0.1 + 0.2}
    written = Publication.from_bytes(orjson.dumps(values), where="p")
    written.write(tmp_path)
    assert orjson.loads((tmp_path / FILE).read_bytes()) == values
    assert [*orjson.loads((tmp_path / FILE).read_bytes())] == [*VALUES]
    assert Publication.read(tmp_path) == written
    assert written.adapters == ("streamlearn-regime-1@184-5d3c1f",)


def test_what_is_no_publication_is_refused(tmp_path: Path) -> None:
    """Whatever part of one a copy or a full disk has kept; with this error and no other."""
    complete = orjson.dumps(VALUES)
    for data in (*(complete[:end] for end in range(len(complete))), b"null", b"[]", b'"a"', b"1", b'{"format": 1}'):
        with pytest.raises(PublicationError):
            Publication.from_bytes(data, where="p")
    with pytest.raises(PublicationError, match=f"{FILE}: the publication cannot be read: No such file"):
        Publication.read(tmp_path)


def test_nothing_outside_the_folder_is_ever_named() -> None:
    for path in ("/etc/passwd", "../routing", "a/../../b", "", ".", "a//b", "a/./b", "a\0b"):
        for field in ("routing", "tokenizer"):
            assert refused(**{field: path}).startswith(f"p: {field}: ")


def test_a_name_has_one_meaning() -> None:
    """Of slots and numbers, of adapters, which are named after their regime, and of the backbone."""
    first, second = VALUES["regimes"]
    for field in ("slot", "number"):
        regimes = [first | {"adapter": None}, second | {field: first[field]}]
        assert f"every regime must have its own {field}" in refused(regimes=regimes)
    for adapter in (
        "streamlearn-regime-2@184-5d3c1f",
        "streamlearn-regime-1",
        "streamlearn-regime-1@",
        "x@1",
        "streamlearn-regime-1@1-",
    ):
        message = refused(regimes=[first | {"adapter": adapter}, second])
        assert "must be named streamlearn-regime-1@STEP-RUN" in message
    for backbone in ("streamlearn", "streamlearn-regime-2", "streamlearn-regime-1@184-5d3c1f"):
        assert "backbone must differ" in refused(backbone=backbone)
    assert "expected format 1, found 2" in refused(format=2)
    assert "expected a time in UTC" in refused(written_at="2026-01-31T12:00:00+02:00")


def test_other_users_may_read_a_publication(tmp_path: Path) -> None:
    """Gateway and model servers run as users of their own; the umask decides."""
    before = os.umask(0o022)
    try:
        Publication.from_bytes(orjson.dumps(VALUES), where="p").write(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o644


class RecordingFiles(Files):
    """Notes every operation, and fails at the one that is named."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def write(self, path: Path, data: bytes) -> None:
        self._note("write", path)
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._note("sync folder" if path.is_dir() else "sync", path)
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._note("rename", new)
        super().rename(old, new)

    def _note(self, call: str, path: Path) -> None:
        self.calls.append(call)
        if call == self._failing:
            raise OSError(28, os.strerror(28), str(path))


def test_a_publication_is_durable_before_it_is_seen(tmp_path: Path) -> None:
    """The order of these operations decides what a power loss leaves."""
    files = RecordingFiles()
    Publication.from_bytes(orjson.dumps(VALUES), where="p").write(tmp_path, files)
    assert files.calls == ["write", "sync", "rename", "sync folder"]


@pytest.mark.parametrize("failing", ["write", "sync", "rename"])
def test_a_failed_write_leaves_the_old_publication_only(tmp_path: Path, failing: str) -> None:
    """And no file beside it."""
    old = Publication.from_bytes(orjson.dumps(VALUES), where="p")
    old.write(tmp_path)
    with pytest.raises(PublicationError, match="No space left"):
        old.model_copy(update={"sequence": 18}).write(tmp_path, RecordingFiles(failing))
    assert Publication.read(tmp_path) == old
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_state_survives_a_round_trip(tmp_path: Path) -> None:
    """To the last bit, with every type."""
    state = read_routing(tmp_path, publish_sample(tmp_path))
    read, written = to_arrays(state), sample_state()
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_anything_else_is_an_error_with_its_path(tmp_path: Path) -> None:
    publication = publish_sample(tmp_path)
    complete = (tmp_path / publication.routing).read_bytes()
    for data in (b"", b"{}", complete[:-1], save({"integers": np.zeros(8, np.int64)})):
        (tmp_path / publication.routing).write_bytes(data)
        with pytest.raises(PublicationError, match=r"184\.safetensors: expected the arrays"):
            read_routing(tmp_path, publication)
