"""What an operator asked for is read as it was written, or refused."""

from pathlib import Path

import orjson
import pytest

from streamlearn import controls as control_file
from streamlearn.controls import ControlFile, ControlState
from streamlearn.errors import SnapshotError
from streamlearn.stream.record import OffsetRange, TopicPartition

STATE = ControlState(True, frozenset({"00000042"}), (OffsetRange(TopicPartition("orders", 1), 5, 9),), "00000042")


def test_the_state_round_trips(tmp_path: Path) -> None:
    assert control_file.read(tmp_path) == ControlState()
    ControlFile(tmp_path).write(STATE)
    assert ControlFile(tmp_path).state == STATE


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    """An offset that was altered would skip the wrong records."""
    ControlFile(tmp_path).write(STATE)
    path = tmp_path / control_file.CONTROL_FILE_NAME
    data = path.read_bytes()
    for index in range(len(data) - 1):  # the last one is the newline
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        with pytest.raises(SnapshotError, match=r"restore the file from a backup|version"):
            control_file.read(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    """Its meaning is not known, and the message says what to do."""
    body = orjson.loads(STATE.to_bytes())
    del body["crc32"]
    body["version"] = 2
    from streamlearn.controls import _checksum  # noqa: PLC0415

    (tmp_path / control_file.CONTROL_FILE_NAME).write_bytes(orjson.dumps({**body, "crc32": _checksum(body)}))
    with pytest.raises(SnapshotError, match="reads version 1, found version 2: run the release that wrote it"):
        ControlFile(tmp_path)
