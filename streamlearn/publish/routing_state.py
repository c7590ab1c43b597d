"""The routing state of a publication: the monitor's state as a safetensors file, read and written without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from streamlearn.errors import PublicationError
from streamlearn.publish.publication import Publication
from streamlearn.shift import state_arrays
from streamlearn.shift.monitor_state import MonitorState


def to_bytes(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """The content of the file, from `Monitor.state`."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read(folder: Path, publication: Publication) -> MonitorState:
    """Read the state that a publication names, and check that both speak of the same regimes.

    Raises:
        PublicationError: the file is missing, damaged or of other regimes.
    """
    path = folder / publication.routing
    try:
        arrays: dict[str, NDArray[Any]] = load(path.read_bytes())
        state = state_arrays.from_arrays(arrays)
    except OSError as error:
        raise PublicationError(f"{path}: the routing state cannot be read: {error.strerror}") from error
    except (SafetensorError, KeyError, ValueError, IndexError, TypeError, StopIteration) as error:
        raise PublicationError(
            f"{path}: expected the arrays of a monitor's state, found {type(error).__name__}: {error}"
        ) from error
    profiles = enumerate(state.detector.regimes)
    found = {slot: profile.number for slot, profile in profiles if profile is not None}
    expected = {each.slot: each.number for each in publication.regimes}
    if found != expected:
        raise PublicationError(
            f"{path}: expected the regimes of the publication, by slot {expected}, found {found}; publish again"
        )
    return state
