"""Examples as the fields and arrays of a message. Of images the bytes are sent; each process decodes its own."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.stream.decode import Example

Restored = Callable[[Example, Sequence[bytes]], Example]
"""`Decoder.restored`: an example with its images, given their bytes."""


def to_message(examples: Sequence[Example]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return fields and arrays of a message that `from_message` reads."""
    images = [image.data for example in examples for image in example.images]
    fields = {
        "types": [example.sample_type for example in examples],
        "images": [len(example.images) for example in examples],
    }
    arrays = [
        np.array([len(example) for example in examples]),
        np.concatenate([example.input_ids for example in examples]),
        np.concatenate([example.labels for example in examples]),
        np.array([len(data) for data in images], dtype=np.int64),
        np.frombuffer(b"".join(images), dtype=np.uint8),
    ]
    return fields, arrays


def from_message(
    fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]], own: Sequence[int], restored: Restored
) -> list[Example]:
    """Return the examples with these indices."""
    lengths, input_ids, labels, image_lengths, image_data = arrays
    cuts = np.cumsum(lengths)[:-1]
    parts = list(zip(np.split(input_ids, cuts), np.split(labels, cuts), fields["types"], strict=True))
    pieces = iter(np.split(image_data, np.cumsum(image_lengths)[:-1]))
    images = [[bytes(piece) for piece in islice(pieces, count)] for count in fields["images"]]
    return [
        restored(Example(*parts[index]), images[index]) if images[index] else Example(*parts[index]) for index in own
    ]
