"""Records of each regime that are never trained on.

Every `every_records`-th record of a regime is held out; a uniform sample of bounded size of them is kept (reservoir
sampling, Vitter 1985, algorithm R). A record that leaves the sample is not trained on either, since it was evaluated
before. Draws are a function of the seed, the slot and the count, so the sample depends on the stream only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import HoldoutSettings
from streamlearn.stream.decode import Example

Arrays = Mapping[str, NDArray[Any]]


def _without_images(example: Example, images: Sequence[bytes]) -> Example:
    raise AssertionError(f"{len(images)} images in a snapshot of a backbone that reads text, of {len(example)} tokens")


class HoldoutReservoirs:
    """One reservoir per regime slot."""

    def __init__(
        self,
        settings: HoldoutSettings,
        *,
        regimes: int,
        seed: int,
        restored: Callable[[Example, Sequence[bytes]], Example] = _without_images,
    ) -> None:
        """`restored` rebuilds an example's images from the bytes that a snapshot keeps."""
        self._settings = settings
        self._restored = restored
        self._seed = seed
        self._seen = np.zeros(regimes, dtype=np.int64)
        self._kept: dict[int, list[Example]] = {}

    def take(self, slot: int, example: Example) -> bool:
        """Count a record of the regime in `slot`; true when it is held out and must not be trained on."""
        every = self._settings.every_records
        self._seen[slot] += 1
        if every == 0 or self._seen[slot] % every:
            return False
        for image in example.images:
            image.drop_inputs()
        kept, number = self._kept.setdefault(slot, []), int(self._seen[slot]) // every
        if len(kept) < self._settings.records_per_regime:
            kept.append(example)
        else:
            place = int(np.random.default_rng([self._seed, slot, number]).integers(number))
            if place < len(kept):
                kept[place] = example
        return True

    def examples(self, slot: int) -> tuple[Example, ...]:
        """The sample of one regime; empty until a record was held out."""
        return tuple(self._kept.get(slot, ()))

    def move(self, slot: int, new: int, is_moved: Sequence[bool]) -> None:
        """Move records of one regime's sample, and as large a part of its count, to another regime's."""
        pairs = list(zip(self._kept.get(slot, []), is_moved, strict=True))
        moved = [example for example, flag in pairs if flag]
        if not moved:
            return
        self._kept[slot] = [example for example, flag in pairs if not flag]
        self._kept[new] = [*moved, *self._kept.get(new, [])][: self._settings.records_per_regime]
        number = int(self._seen[slot]) * len(moved) // len(pairs)
        self._seen[slot] -= number
        self._seen[new] += number

    def clear(self, slot: int) -> None:
        """Drop a regime's sample: its slot has another regime now, or its answers are outdated."""
        self._kept.pop(slot, None)
        self._seen[slot] = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """Plain arrays: all samples concatenated, in slot order; names are those of snapshot format 2."""
        rows = [(slot, example) for slot in sorted(self._kept) for example in self._kept[slot]]
        empty = [np.zeros(0, dtype=np.int64)]
        images = [image.data for _, example in rows for image in example.images]
        return {
            "seen": self._seen.copy(),
            "slots": np.array([slot for slot, _ in rows], dtype=np.int64),
            "lengths": np.array([len(example) for _, example in rows], dtype=np.int64),
            "input_ids": np.concatenate(empty + [example.input_ids.astype(np.int64) for _, example in rows]),
            "labels": np.concatenate(empty + [example.labels.astype(np.int64) for _, example in rows]),
            "pictures": np.array([len(example.images) for _, example in rows], dtype=np.int64),
            "picture_bytes": np.array([len(data) for data in images], dtype=np.int64),
            "picture_data": np.frombuffer(b"".join(images), dtype=np.uint8).astype(np.uint8),
        }

    def load_state(self, arrays: Arrays) -> None:
        """The inverse of `state`."""
        seen = arrays["seen"]
        self._seen[:] = 0
        self._seen[: len(seen)] = seen  # `shift.max_regimes` may have grown
        self._kept = {}
        cuts = np.cumsum(arrays["lengths"])[:-1]
        pieces = zip(
            arrays["slots"].tolist(),
            np.split(arrays["input_ids"].astype(np.int32), cuts),
            np.split(arrays["labels"].astype(np.int32), cuts),
            arrays["pictures"].tolist(),
            strict=False,  # splitting nothing gives one empty piece
        )
        images = iter(np.split(arrays["picture_data"], np.cumsum(arrays["picture_bytes"])[:-1]))
        for slot, input_ids, labels, number in pieces:
            example = Example(input_ids, labels)
            if number:
                example = self._restored(example, [bytes(next(images)) for _ in range(number)])
            self._kept.setdefault(slot, []).append(example)
