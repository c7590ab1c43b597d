"""Records before and after decoding, and batches of them; positions are in `position`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import Reason
from streamlearn.stream.position import PartitionRun, RecordId, TopicPartition


@dataclass(frozen=True, slots=True)
class Record:
    """One message as read from the log, bytes unchanged."""

    origin: TopicPartition
    offset: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 0
    unreadable: str = ""
    """Why the client could not parse the record; the other fields hold what it could read. Empty for most records."""

    @property
    def id(self) -> RecordId:
        return RecordId(self.origin, self.offset)


class Form(NamedTuple):
    """One of the shapes that a record may have; its keys decide which."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    is_text: bool = False
    """Whether its fields are strings, which a template can build from columns."""
    takes_images: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """Every key of the form itself; `image` and `meta` may come with them."""
        return self.required + self.optional

    def is_made_by(self, keys: Collection[str]) -> bool:
        """Whether these keys, without `image` and `meta`, are a record of this form."""
        return set(self.required) <= set(keys) <= set(self.fields)


FORMS = (
    Form("prompt + completion", ("prompt", "completion"), is_text=True, takes_images=True),
    Form("messages", ("messages",), takes_images=True),
    Form("text", ("text",), is_text=True),
    Form("input_ids", ("input_ids",), ("labels",)),
)
"""In order of preference where columns of a file make several."""
COMPANIONS = ("image", "tools", "meta", "sample_type")
"""Keys that may come with a form."""

IGNORED = -100
"""Label of a token that is not learned."""


def kto_label(value: object) -> bool | None:
    """Whether KTO's `label` marks an answer as good, as JSON and CSV have it; None for any other value.

    >>> kto_label(False), kto_label("True"), kto_label("billing")
    (False, True, None)
    """
    return {"true": True, "false": False}.get(str(value).strip().casefold()) if isinstance(value, bool | str) else None


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """What a backbone's processor computes from one image."""

    token_ids: tuple[int, ...]
    """The tokens that replace the image's placeholder."""
    features: Mapping[str, NDArray[np.generic]]
    """Keyword arguments of the forward pass."""


class RecordImage:
    """One image of a record: its bytes, a coarse description, and the model's inputs."""

    def __init__(
        self,
        data: bytes,
        visual_words: NDArray[np.int32],
        axes: Mapping[str, int],
        inputs: ImageInputs,
        compute: Callable[[], ImageInputs],
    ) -> None:
        """Hold an image that is decoded already; `compute` returns its inputs again after `drop_inputs`."""
        self.data = data
        self.visual_words = visual_words
        """A few integers that are equal for similar images, for shift detection."""
        self.axes = axes
        """The axis along which each feature of several images is concatenated."""
        self._inputs: ImageInputs | None = inputs
        self._compute = compute

    @property
    def extent(self) -> int:
        """Length of the pixel values along the axis of concatenation: images, tiles or patches."""
        return int(self.inputs.features["pixel_values"].shape[self.axes["pixel_values"]])

    @property
    def inputs(self) -> ImageInputs:
        if self._inputs is None:
            self._inputs = self._compute()
        return self._inputs

    def drop_inputs(self) -> None:
        """Keep only the bytes until the inputs are needed again."""
        self._inputs = None


@dataclass(frozen=True, slots=True, eq=False)
class Truncation:
    """What a record was before it was cut to `stream.max_tokens`."""

    form: str
    """Name of its form."""
    num_cut: int
    """Tokens cut off."""
    input_ids: NDArray[np.int32]
    """Its tokens that are not learned, for detection and routing; see `truncate.Draft`."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One decoded record: `labels[t]` is the token at `t` itself, or -100 where nothing is learned."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    sample_type: str | None = None
    """LoRAMoE's type of the sample; None when the record has none."""
    images: tuple[RecordImage, ...] = ()
    """The record's images, in order."""
    image_starts: tuple[int, ...] = ()
    """Index of each image's first token."""
    positions: NDArray[np.int64] | None = None
    """(P, T) positions of the tokens; None if they are 0, 1, 2, ..."""
    truncation: Truncation | None = None
    """None if the record was not cut."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_length(self) -> int:
        """Index of the first label."""
        return int(np.argmax(self.labels != IGNORED))

    @property
    def num_learned(self) -> int:
        """Tokens with a label that another token can predict."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


@dataclass(frozen=True, slots=True, eq=False)
class StoredExample:
    """An example as it is saved, and sent to other processes: an image is its bytes."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    sample_type: str | None = None
    images: tuple[bytes, ...] = ()
    truncation: Truncation | None = None

    @classmethod
    def from_example(cls, example: Example) -> Self:
        """Leave out everything that can be computed again from images."""
        images = tuple(image.data for image in example.images)
        return cls(example.input_ids, example.labels, example.sample_type, images, example.truncation)

    def restored(self, with_images: Callable[[Example, Sequence[bytes]], Example]) -> Example:
        """Return the example; `with_images` is `Decoder.with_images`."""
        example = Example(self.input_ids, self.labels, self.sample_type, truncation=self.truncation)
        return with_images(example, self.images) if self.images else example


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The input of a generation."""

    ids: list[int]
    images: tuple[RecordImage, ...] = ()
    positions: NDArray[np.int64] | None = None
    """See `Example.positions`."""
    truncation: Truncation | None = None
    """None if it was not cut."""

    def __len__(self) -> int:
        return len(self.ids)


class DeadLetteredRecord(NamedTuple):
    """A record that became a dead letter, and the reason."""

    id: RecordId
    reason: Reason
    message: str = ""
    """For people; nothing of the record's content."""


class IgnoredRecord(NamedTuple):
    """A record that there is nothing to learn from by its nature, and why: a deletion, for example."""

    id: RecordId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one training step, and those that became dead letters or were ignored while it was filled."""

    records: tuple[Record, ...]
    """The records trained on, in order; `examples[i]` is `records[i]` decoded."""
    examples: tuple[Example, ...]
    dead_lettered: tuple[DeadLetteredRecord, ...] = ()
    """The records that became dead letters; their content is not kept."""
    runs: tuple[PartitionRun, ...] = ()
    """All of these records in the order in which they were read, for the journal."""
    ignored: tuple[IgnoredRecord, ...] = ()
    """The records that were ignored; they are in `runs` too."""

    @property
    def truncations(self) -> tuple[Truncation, ...]:
        """Of the examples that were cut."""
        return tuple(example.truncation for example in self.examples if example.truncation is not None)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.input_ids) for example in self.examples)
