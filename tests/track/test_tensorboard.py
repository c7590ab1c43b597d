"""Event files, read back record by record."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboardX")

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from streamlearn.errors import ConfigError
from streamlearn.track import Note, Point, TensorBoardTracker, TrackedSample, TrackError

SAMPLE = TrackedSample(12, 17.5, (Point("loss/batch", 12, 2.0), Point("holdout_loss/regime_1", 9, 3.0)))


def events(folder: Path) -> Iterator[Any]:
    """Every event of every file, after its checksums were compared."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            record, data = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<I", data[:4])[0] == masked_crc32c(record)
            data = data[4:]
            yield event_pb2.Event.FromString(record)


def test_points_are_read_back_with_their_steps(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tb", lambda: 17.0)
    tracker.write([SAMPLE])
    version, *found = events(tmp_path / "tb")  # flushed by the write itself
    assert version.file_version == "brain.Event:2"
    assert [(e.step, e.wall_time, e.summary.value[0].tag, e.summary.value[0].simple_value) for e in found] == [
        (12, 17.5, "loss/batch", 2.0),
        (9, 17.5, "holdout_loss/regime_1", 3.0),
    ]
    tracker.close(finished=True)
    tracker.close(finished=True)


def test_a_rewind_voids_later_steps_and_a_shift_is_text(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, lambda: 17.0)
    tracker.write([TrackedSample(8, 18.0, (), (Note("shift/inputs", 8, "inputs 1: regime 1 to 2"),), rewound_to=8)])
    tracker.close(finished=False)
    _, start, text = events(tmp_path)
    assert (start.step, start.session_log.status) == (9, event_pb2.SessionLog.START)
    assert text.summary.value[0].tensor.string_val == [b"inputs 1: regime 1 to 2"]


def test_a_failed_write_begins_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the first may be damaged."""
    tracker = TensorBoardTracker(tmp_path, lambda: 17.0)
    tracker.write([SAMPLE])

    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker._writer, "write", full)
    with pytest.raises(TrackError, match="must be writable: No space left on device"):
        tracker.write([SAMPLE])
    tracker.write([SAMPLE])
    tracker.close(finished=True)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(list(events(tmp_path))) == 6


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensorboardX", "tensorboardX.proto"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'streamlearn\[tensorboard\]'"):
        TensorBoardTracker(tmp_path, lambda: 17.0)
