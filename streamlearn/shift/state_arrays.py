"""The monitor's state as plain arrays, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import ragged
from streamlearn.shift import regime_memory as regimes
from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import NUM_FEATURES, Features
from streamlearn.shift.fit_drop_test import RunningStats
from streamlearn.shift.input_shift_detector import DetectorState
from streamlearn.shift.segment_classifier import RecentRecord

Ghosts = tuple[tuple[int, ...], ...]
Memory = tuple[DetectorState, Ghosts]
"""The monitor when it had looked at one batch and at none later."""
_INTEGERS = ("ordinal", "slot", "num_shifts", "own_records", "run_start", "rival", "patience", "next_number")
_REALS = ("share", "evidence")


def to_arrays(state: DetectorState, ghosts: Ghosts) -> dict[str, NDArray[np.generic]]:
    """Everything, by name; no array holds objects."""
    return {
        "integers": np.array([getattr(state, name) for name in _INTEGERS], dtype=np.int64),
        "usual": np.array(astuple(state.running), dtype=np.float64),
        "reals": np.array([getattr(state, name) for name in _REALS], dtype=np.float64),
        "shares.records": state.shares.records_B,
        "shares.number": np.array([state.shares.number]),
        **_entries("window", state.window),
        **_entries("others", state.others),
        **regimes.to_arrays(state.regimes),
        "ghosts.sizes": np.array([len(slots) for slots in ghosts], dtype=np.int64),
        "ghosts.slots": np.array([slot for slots in ghosts for slot in slots], dtype=np.int64),
    }


def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> tuple[DetectorState, Ghosts]:
    """The inverse of `to_arrays`."""
    integers = dict(zip(_INTEGERS, arrays["integers"].tolist(), strict=True))
    reals = dict(zip(_REALS, arrays["reals"].tolist(), strict=True))
    state = DetectorState(
        **integers,
        **reals,
        running=RunningStats(*arrays["usual"].tolist()),
        shares=DocumentFrequency(
            np.array(arrays["shares.records"], dtype=np.float32), float(arrays["shares.number"][0])
        ),
        window=_read_entries("window", arrays),
        others=_read_entries("others", arrays),
        regimes=regimes.from_arrays(arrays),
    )
    slots = arrays["ghosts.slots"].tolist()
    ends = np.cumsum(arrays["ghosts.sizes"]).tolist()
    starts = [0, *ends[:-1]]
    return state, tuple(tuple(slots[start:end]) for start, end in zip(starts, ends, strict=False))


def _entries(name: str, entries: Sequence[RecentRecord]) -> dict[str, NDArray[np.generic]]:
    records = [each.record for each in entries]
    return {
        f"{name}.phi": np.array([record.phi_D for record in records], np.float32).reshape(-1, NUM_FEATURES),
        f"{name}.log_length": np.array([record.log_length for record in records], np.float64),
        f"{name}.ordinal": np.array([each.ordinal for each in entries], np.int64),
        f"{name}.slot": np.array([each.slot for each in entries], np.int64),
        f"{name}.log_ratio": np.array([each.log_ratio for each in entries], np.float64),
        **ragged.to_arrays(f"{name}.buckets", [record.buckets for record in records]),
    }


def _read_entries(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> tuple[RecentRecord, ...]:
    buckets = ragged.from_arrays(f"{name}.buckets", arrays)
    records = [
        Features(np.array(phi_D, dtype=np.float32), each, float(length))
        for phi_D, each, length in zip(
            arrays[f"{name}.phi"], buckets, arrays[f"{name}.log_length"].tolist(), strict=True
        )
    ]
    columns = (arrays[f"{name}.{column}"].tolist() for column in ("ordinal", "slot", "log_ratio"))
    return tuple(RecentRecord(*each) for each in zip(records, *columns, strict=True))
