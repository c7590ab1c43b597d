"""A uniform sample of all items offered so far, of bounded size (reservoir sampling; Vitter 1985, algorithm R)."""

import random
from typing import Generic, TypeVar

T = TypeVar("T")


class Reservoir(Generic[T]):
    """At most `capacity` items; each item offered is in the sample with the same probability."""

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.items: list[T] = []
        self._capacity = capacity
        self._seen = 0
        self._random = random.Random(seed)

    def offer(self, item: T) -> None:
        """Offer the next item."""
        self._seen += 1
        if len(self.items) < self._capacity:
            self.items.append(item)
        elif (place := self._random.randrange(self._seen)) < self._capacity:
            self.items[place] = item

    def draw(self, num: int) -> list[T]:
        """Draw up to `num` different items."""
        return self._random.sample(self.items, min(num, len(self.items)))
