"""The monitor's state as plain arrays, and back. Array names are part of the snapshot format."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import ragged
from streamlearn.shift.absence_test import AbsenceState
from streamlearn.shift.detector_state import DetectorState
from streamlearn.shift.document_frequency import DocumentFrequency, count_records
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.fit_drop_test import RunningStats
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.recent_record import RecentRecord, stack_phi
from streamlearn.shift.reference_distribution import ReferenceDistribution
from streamlearn.shift.refused import RefusedRecord, RefusedReturn
from streamlearn.shift.regime_memory import SavedProfiles
from streamlearn.shift.regime_profile import ADDED_SCALARS, SCALARS, RegimeProfile, SampledRecord
from streamlearn.shift.segment import SegmentState
from streamlearn.shift.segment_window import WindowState

Arrays = Mapping[str, NDArray[np.generic]]
_INTEGER_SCALARS = ("number", "visits", "records", "first_record", "last_record", "is_separated", "next_test")
_VACANT = RegimeProfile(number=0, first_record=0)  # numbers of regimes begin at 1


def to_arrays(state: MonitorState) -> dict[str, NDArray[np.generic]]:
    """The state by array name. No array holds objects."""
    detector, undecided, segment = state.detector, state.undecided, state.detector.segment
    absence, window = segment.absence, segment.window
    integers = (
        detector.ordinal,
        segment.slot,
        detector.num_shifts,
        segment.num_records,
        absence.run_start,
        segment.parent,
        segment.cooldown,
        detector.next_number,
    )
    return {
        "integers": np.array(integers, dtype=np.int64),
        "usual": np.array(astuple(window.fits_before), dtype=np.float64),
        "reals": np.array([absence.share, absence.statistic], dtype=np.float64),
        "shares.records": window.tokens_before.records_B,
        "shares.number": np.array([window.tokens_before.num_records]),
        **_records_to_arrays("window", window.records),
        **_records_to_arrays("others", segment.other_records),
        **profiles_to_arrays(detector.regimes),
        "ghosts.sizes": np.array([len(slots) for slots in undecided], dtype=np.int64),
        "ghosts.slots": np.array([slot for slots in undecided for slot in slots], dtype=np.int64),
        **({"forgotten": np.array([segment.forgotten], dtype=np.int64)} if segment.forgotten else {}),
        **_refusals("refused", detector.refused),
        **_refusals("refused.records", detector.refused_records),
    }


def from_arrays(arrays: Arrays) -> MonitorState:
    """Inverse of `to_arrays`."""
    ordinal, slot, num_shifts, num_records, run_start, parent, cooldown, next_number = arrays["integers"].tolist()
    share, statistic = arrays["reals"].tolist()
    tokens_before = DocumentFrequency(
        np.array(arrays["shares.records"], dtype=np.float32), float(arrays["shares.number"][0])
    )
    fits_before = RunningStats(*arrays["usual"].tolist())
    segment = SegmentState(
        slot=slot,
        parent=parent,
        num_records=num_records,
        cooldown=cooldown,
        window=WindowState(_records_from_arrays("window", arrays), fits_before, tokens_before),
        other_records=_records_from_arrays("others", arrays),
        absence=AbsenceState(share, statistic, run_start),
        forgotten=int(arrays["forgotten"][0]) if "forgotten" in arrays else 0,
    )
    detector = DetectorState(
        ordinal,
        num_shifts,
        segment,
        profiles_from_arrays(arrays),
        next_number,
        tuple(RefusedReturn(*row) for row in arrays["refused"].tolist()) if "refused" in arrays else (),
        tuple(RefusedRecord(*row) for row in arrays["refused.records"].tolist()) if "refused.records" in arrays else (),
    )
    slots = iter(arrays["ghosts.slots"].tolist())
    return MonitorState(detector, tuple(tuple(islice(slots, size)) for size in arrays["ghosts.sizes"].tolist()))


def _refusals(name: str, refused: Sequence[RefusedReturn | RefusedRecord]) -> dict[str, NDArray[np.generic]]:
    """One row each; nothing if there are none."""
    return {name: np.array(list(map(astuple, refused)), dtype=np.int64)} if refused else {}


def profiles_to_arrays(saved: SavedProfiles) -> dict[str, NDArray[np.generic]]:
    """Regime profiles, one row per slot; that of a vacant one has the number 0."""
    profiles = [_VACANT if each is None else each for each in saved]
    references = [each.reference.to_row() for each in profiles]
    frequencies = [each.token_frequency for each in profiles]
    sampled = [record for each in profiles for record in each.sample]
    return {
        "regimes.counts": _rows([each.counts_B for each in profiles], np.float32, NUM_BUCKETS),
        "regimes.scalars": _scalars(SCALARS, profiles),
        "regimes.references": _rows(references, np.float64, ReferenceDistribution.ROW),
        "regimes.shares": _rows([each.records_B for each in frequencies], np.float32, NUM_BUCKETS),
        "regimes.shares.numbers": np.array([each.num_records for each in frequencies], dtype=np.float64),
        "regimes.exemplars": np.array([len(each.sample) for each in profiles], dtype=np.int64),
        "regimes.sampled": _rows([np.array([each.log_length, each.ordinal]) for each in sampled], np.float64, 2),
        "regimes.scalars.added": _scalars(ADDED_SCALARS, profiles),
        **ragged.to_arrays("regimes.exemplars", [record.buckets for record in sampled]),
    }


def profiles_from_arrays(arrays: Arrays) -> SavedProfiles:
    """Inverse of `profiles_to_arrays`."""
    buckets = ragged.from_arrays("regimes.exemplars", arrays)
    if "regimes.sampled" in arrays:
        details = arrays["regimes.sampled"].tolist()
    else:  # written before they were kept: the length is that of the buckets, and the order is unknown
        details = [(float(np.log(len(each))), -index) for index, each in enumerate(buckets)]
    pairs = zip(buckets, details, strict=True)
    sampled = iter([SampledRecord(each, log_length, int(ordinal)) for each, (log_length, ordinal) in pairs])
    return tuple(
        _profile_from_arrays(arrays, slot, tuple(islice(sampled, number)))
        for slot, number in enumerate(arrays["regimes.exemplars"].tolist())
    )


def _profile_from_arrays(arrays: Arrays, slot: int, sample: tuple[SampledRecord, ...]) -> RegimeProfile | None:
    if int(arrays["regimes.scalars"][slot][SCALARS.index("number")]) == _VACANT.number:
        return None
    scalars = dict(zip(SCALARS, arrays["regimes.scalars"][slot].tolist(), strict=True))
    if "regimes.scalars.added" in arrays:
        scalars |= zip(ADDED_SCALARS, arrays["regimes.scalars.added"][slot].tolist(), strict=True)
    else:  # older snapshots judge single records by the one scale that they have
        scalars["fit_tail"] = scalars["fit_scale"]
    values: dict[str, Any] = scalars | {name: int(scalars[name]) for name in _INTEGER_SCALARS if name in scalars}
    if "regimes.shares" in arrays:
        records_B = np.array(arrays["regimes.shares"][slot], dtype=np.float32)
        token_frequency = DocumentFrequency(records_B, float(arrays["regimes.shares.numbers"][slot]))
    else:  # written before document frequencies were kept: estimated from the sample
        token_frequency = DocumentFrequency(count_records(each.buckets for each in sample), float(len(sample)))
    return RegimeProfile(
        counts_B=np.array(arrays["regimes.counts"][slot], dtype=np.float32),
        reference=ReferenceDistribution.from_row(np.asarray(arrays["regimes.references"][slot], dtype=np.float64)),
        token_frequency=token_frequency,
        sample=sample,
        **values,
    )


def _records_to_arrays(name: str, records: Sequence[RecentRecord]) -> dict[str, NDArray[np.generic]]:
    return {
        f"{name}.phi": stack_phi(records),
        f"{name}.log_length": np.array([each.features.log_length for each in records], np.float64),
        f"{name}.ordinal": np.array([each.ordinal for each in records], np.int64),
        f"{name}.slot": np.array([each.slot for each in records], np.int64),
        f"{name}.log_ratio": np.array([each.log_ratio for each in records], np.float64),
        **ragged.to_arrays(f"{name}.buckets", [each.features.buckets for each in records]),
    }


def _records_from_arrays(name: str, arrays: Arrays) -> tuple[RecentRecord, ...]:
    phi_ND = np.array(arrays[f"{name}.phi"], dtype=np.float32)
    buckets = ragged.from_arrays(f"{name}.buckets", arrays)
    summaries = zip(phi_ND, buckets, arrays[f"{name}.log_length"].tolist(), strict=True)
    features = [Features(*each) for each in summaries]
    columns = (arrays[f"{name}.{column}"].tolist() for column in ("ordinal", "slot", "log_ratio"))
    return tuple(RecentRecord(*each) for each in zip(features, *columns, strict=True))


def _scalars(names: Sequence[str], profiles: Sequence[RegimeProfile]) -> NDArray[Any]:
    values = [np.array([getattr(each, name) for name in names], dtype=np.float64) for each in profiles]
    return _rows(values, np.float64, len(names))


def _rows(rows: Sequence[NDArray[Any]], dtype: type, width: int) -> NDArray[Any]:
    return np.array(rows, dtype=dtype).reshape(len(rows), width)
