"""How an input was routed, or would be."""

from typing import NamedTuple

from streamlearn.adapters.sequences import Slot
from streamlearn.status.answered_by import Route


class RoutedInput(NamedTuple):
    """A route, and the slot for the forward pass."""

    slot: Slot
    route: Route
