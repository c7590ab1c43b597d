"""The monitor's state as plain arrays, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import ragged, regimes
from streamlearn.shift.fit_drop import Usual
from streamlearn.shift.judge import Entry
from streamlearn.shift.shares import Shares
from streamlearn.shift.signature import NUM_FEATURES, Signature
from streamlearn.shift.watch import WatchState

Ghosts = tuple[tuple[int, ...], ...]
Memory = tuple[WatchState, Ghosts]
"""The monitor when it had looked at one batch and at none later."""
_INTEGERS = ("ordinal", "slot", "num_shifts", "own_records", "run_start", "rival", "patience", "next_number")
_REALS = ("share", "evidence")


def to_arrays(state: WatchState, ghosts: Ghosts) -> dict[str, NDArray[np.generic]]:
    """Everything, by name; no array holds objects."""
    return {
        "integers": np.array([getattr(state, name) for name in _INTEGERS], dtype=np.int64),
        "usual": np.array(astuple(state.usual), dtype=np.float64),
        "reals": np.array([getattr(state, name) for name in _REALS], dtype=np.float64),
        "shares.records": state.shares.records_B,
        "shares.number": np.array([state.shares.number]),
        **_entries("window", state.window),
        **_entries("others", state.others),
        **regimes.to_arrays(state.regimes),
        "ghosts.sizes": np.array([len(slots) for slots in ghosts], dtype=np.int64),
        "ghosts.slots": np.array([slot for slots in ghosts for slot in slots], dtype=np.int64),
    }


def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> tuple[WatchState, Ghosts]:
    """The inverse of `to_arrays`."""
    integers = dict(zip(_INTEGERS, arrays["integers"].tolist(), strict=True))
    reals = dict(zip(_REALS, arrays["reals"].tolist(), strict=True))
    state = WatchState(
        **integers,
        **reals,
        usual=Usual(*arrays["usual"].tolist()),
        shares=Shares(np.array(arrays["shares.records"], dtype=np.float32), float(arrays["shares.number"][0])),
        window=_read_entries("window", arrays),
        others=_read_entries("others", arrays),
        regimes=regimes.from_arrays(arrays),
    )
    slots = arrays["ghosts.slots"].tolist()
    ends = np.cumsum(arrays["ghosts.sizes"]).tolist()
    starts = [0, *ends[:-1]]
    return state, tuple(tuple(slots[start:end]) for start, end in zip(starts, ends, strict=False))


def _entries(name: str, entries: Sequence[Entry]) -> dict[str, NDArray[np.generic]]:
    records = [each.record for each in entries]
    return {
        f"{name}.phi": np.array([record.phi_D for record in records], np.float32).reshape(-1, NUM_FEATURES),
        f"{name}.log_length": np.array([record.log_length for record in records], np.float64),
        f"{name}.ordinal": np.array([each.ordinal for each in entries], np.int64),
        f"{name}.slot": np.array([each.slot for each in entries], np.int64),
        f"{name}.log_ratio": np.array([each.log_ratio for each in entries], np.float64),
        **ragged.to_arrays(f"{name}.buckets", [record.buckets for record in records]),
    }


def _read_entries(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> tuple[Entry, ...]:
    buckets = ragged.from_arrays(f"{name}.buckets", arrays)
    records = [
        Signature(np.array(phi_D, dtype=np.float32), each, float(length))
        for phi_D, each, length in zip(
            arrays[f"{name}.phi"], buckets, arrays[f"{name}.log_length"].tolist(), strict=True
        )
    ]
    columns = (arrays[f"{name}.{column}"].tolist() for column in ("ordinal", "slot", "log_ratio"))
    return tuple(Entry(*each) for each in zip(records, *columns, strict=True))
