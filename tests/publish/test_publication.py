"""What a published folder names, what is refused, and what a crash during writing leaves."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save

from streamlearn.codec import to_arrays
from streamlearn.errors import PublicationError
from streamlearn.publish.publication import FILE, Publication, PublishedRegime, read_routing, routing_bytes
from streamlearn.snapshot.files import Files
from tests.gateway.sample_publication import publish_sample, sample_state

VALUES: dict[str, Any] = {
    "format": 1,
    "name": "streamlearn",
    "sequence": 17,
    "written_at": "2026-01-31T12:00:00+00:00",
    "snapshot": "00000184",
    "backbone": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "seed": 0,
    "max_known_rejected": 0.01,
    "routing": "routing/184.safetensors",
    "tokenizer": "tokenizer",
    "regimes": [
        {"slot": 0, "number": 1, "label": None, "adapter": "streamlearn-regime-1@184"},
        {"slot": 1, "number": 2, "label": "tickets", "adapter": None},
    ],
}

_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
_versions = st.none() | st.integers(0, 99_999).map(str)


@st.composite
def publications(draw: st.DrawFn) -> Publication:
    """Any valid publication."""
    name = draw(st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True))
    numbers = draw(st.lists(st.integers(1, 1 << 40), unique=True, max_size=4))
    versions = [draw(_versions) for _ in numbers]
    pairs = enumerate(zip(numbers, versions, strict=True))
    regimes = tuple(
        PublishedRegime(
            slot=slot,
            number=number,
            label=draw(st.none() | _texts),
            adapter=None if version is None else f"{name}-regime-{number}@{version}",
        )
        for slot, (number, version) in pairs
    )
    return Publication(
        name=name,
        sequence=draw(st.integers(0, 1 << 40)),
        written_at=draw(st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC))),
        snapshot=draw(_texts),
        backbone="a/b",
        seed=draw(st.integers(0, 1 << 32)),
        max_known_rejected=draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        routing="routing/1.safetensors",
        tokenizer="tokenizer",
        regimes=regimes,
    )


def refused(**changed: Any) -> str:
    """The message with which these values are refused."""
    with pytest.raises(PublicationError) as error:
        Publication.from_bytes(orjson.dumps(VALUES | changed), where="p")
    return str(error.value)


@given(publication=publications())
def test_a_publication_survives_a_round_trip(publication: Publication) -> None:
    """Times to the microsecond, floats to the last bit."""
    assert Publication.from_bytes(publication.to_bytes(), where="p") == publication


@given(publication=publications(), data=st.data())
def test_a_truncated_publication_is_refused(publication: Publication, data: st.DataObject) -> None:
    """Whatever part of it a copy or a full disk has kept."""
    written = publication.to_bytes().rstrip()
    with pytest.raises(PublicationError):
        Publication.from_bytes(written[: data.draw(st.integers(0, len(written) - 1))], where="p")


@given(values=st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists) | st.just({"format": 1}))
def test_what_is_no_publication_is_refused(values: Any) -> None:
    """With this error and no other."""
    try:
        data = orjson.dumps(values)
    except orjson.JSONEncodeError:
        return  # an integer beyond 64 bits
    with pytest.raises(PublicationError):
        Publication.from_bytes(data, where="p")


def test_the_documented_form_is_what_is_written(tmp_path: Path) -> None:
    """Field by field, in this order."""
    Publication.from_bytes(orjson.dumps(VALUES), where="p").write(tmp_path)
    assert orjson.loads((tmp_path / FILE).read_bytes()) == VALUES
    assert [*orjson.loads((tmp_path / FILE).read_bytes())] == [*VALUES]
    assert Publication.read(tmp_path).adapters == ("streamlearn-regime-1@184",)


@pytest.mark.parametrize("path", ["/etc/passwd", "../routing", "a/../../b", "", ".", "a//b", "a/./b", "a\0b"])
@pytest.mark.parametrize("field", ["routing", "tokenizer"])
def test_a_path_must_stay_inside_the_folder(field: str, path: str) -> None:
    """Nothing outside is ever opened."""
    assert refused(**{field: path}).startswith(f"p: {field}: ")


@pytest.mark.parametrize("field", ["slot", "number"])
def test_slots_and_numbers_are_unique(field: str) -> None:
    """Otherwise a request could be answered by either regime."""
    first, second = VALUES["regimes"]
    message = refused(regimes=[first | {"adapter": None}, second | {field: first[field]}])
    assert f"every regime must have its own {field}" in message


@pytest.mark.parametrize(
    "adapter",
    ["streamlearn-regime-2@184", "streamlearn-regime-1", "streamlearn-regime-1@", "streamlearn-regime-1@a/b", "x@1"],
)
def test_an_adapter_is_named_after_its_regime(adapter: str) -> None:
    """A name that belongs to another regime, or to no version, is refused."""
    first, second = VALUES["regimes"]
    assert "must be named streamlearn-regime-1@SNAPSHOT" in refused(regimes=[first | {"adapter": adapter}, second])


@pytest.mark.parametrize("backbone", ["streamlearn", "streamlearn-regime-2", "streamlearn-regime-1@184"])
def test_the_backbone_has_a_name_of_its_own(backbone: str) -> None:
    """A name must mean one model."""
    assert "backbone must differ" in refused(backbone=backbone)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"format": 2}, "expected format 1, found 2"),
        ({"sequence": "17"}, "sequence"),
        ({"max_known_rejected": 1.0}, "max_known_rejected"),
        ({"written_at": "2026-01-31T12:00:00+02:00"}, "expected a time in UTC"),
        ({"name": "a/b"}, "name"),
        ({"more": 1}, "more"),
    ],
)
def test_a_message_names_what_is_wrong(changed: dict[str, Any], expected: str) -> None:
    assert expected in refused(**changed)


def test_a_publication_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Publication.from_bytes(orjson.dumps(VALUES), where="p").sequence = 18  # type: ignore[misc]


def test_a_missing_publication_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(PublicationError, match=f"{FILE}: the publication cannot be read: No such file"):
        Publication.read(tmp_path)


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
    assert [each.name for each in tmp_path.iterdir()] == [FILE]


def test_a_state_survives_a_round_trip(tmp_path: Path) -> None:
    """To the last bit, with every type."""
    state = read_routing(tmp_path, publish_sample(tmp_path))
    found, written = to_arrays(state), sample_state()
    assert found.keys() == written.keys()
    for name, array in written.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "data", [b"", b"{}", routing_bytes(sample_state())[:-1], save({"integers": np.zeros(8, np.int64)})]
)
def test_anything_else_is_an_error_with_its_path(tmp_path: Path, data: bytes) -> None:
    publication = publish_sample(tmp_path)
    (tmp_path / publication.routing).write_bytes(data)
    with pytest.raises(PublicationError, match=r"184\.safetensors: expected the arrays"):
        read_routing(tmp_path, publication)
