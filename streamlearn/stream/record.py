"""Records before and after decoding, batches of them, and positions in the stream."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import Reason, UsageError


@dataclass(frozen=True, order=True, slots=True)
class TopicPartition:
    """One ordered log. A file is a topic with the single partition 0."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class RecordId(NamedTuple):
    """The identity of a record, without its content."""

    origin: TopicPartition
    offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """One message as read from the log, bytes unchanged."""

    origin: TopicPartition
    offset: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 0

    @property
    def id(self) -> RecordId:
        """The record's identity."""
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

IGNORED = -100
"""Label of a token that is not learned."""


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
        """The model's inputs, computed again after `drop_inputs`."""
        if self._inputs is None:
            self._inputs = self._compute()
        return self._inputs

    def drop_inputs(self) -> None:
        """Keep only the bytes until the inputs are needed again."""
        self._inputs = None


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

    @classmethod
    def from_example(cls, example: Example) -> Self:
        """Leave out everything that can be computed again from images."""
        images = tuple(image.data for image in example.images)
        return cls(example.input_ids, example.labels, example.sample_type, images)

    def restored(self, with_images: Callable[[Example, Sequence[bytes]], Example]) -> Example:
        """Return the example; `with_images` is `Decoder.with_images`."""
        example = Example(self.input_ids, self.labels, self.sample_type)
        return with_images(example, self.images) if self.images else example


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The input of a generation."""

    ids: list[int]
    images: tuple[RecordImage, ...] = ()
    positions: NDArray[np.int64] | None = None
    """See `Example.positions`."""

    def __len__(self) -> int:
        return len(self.ids)


class PartitionRun(NamedTuple):
    """Consecutive records of one partition. Logs have gaps: `num_records` may be less than the offset difference."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    num_records: int

    @property
    def origin(self) -> TopicPartition:
        """The partition of these records."""
        return TopicPartition(self.topic, self.partition)


class DeadLetteredRecord(NamedTuple):
    """A record that became a dead letter, and the reason."""

    id: RecordId
    reason: Reason
    message: str = ""
    """For people; nothing of the record's content."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one training step, and the records that became dead letters while the batch was filled."""

    records: tuple[Record, ...]
    """The records trained on, in order; `examples[i]` is `records[i]` decoded."""
    examples: tuple[Example, ...]
    dead_lettered: tuple[DeadLetteredRecord, ...] = ()
    """The records that became dead letters; their content is not kept."""
    runs: tuple[PartitionRun, ...] = ()
    """All of these records in the order in which they were read, for the journal."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.input_ids) for example in self.examples)


class Gap(NamedTuple):
    """Offsets of one partition, from `lost_from` up to but excluding `lost_to`, that will never be trained."""

    origin: TopicPartition
    lost_from: int
    lost_to: int


@dataclass(frozen=True)
class Position(Mapping[TopicPartition, int]):
    """Per partition, the offset of the next record to train on. Logs have gaps: it is no count of records."""

    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)

    def __getitem__(self, origin: TopicPartition) -> int:
        return self.offsets[origin]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(sorted(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets)

    def __str__(self) -> str:
        return ", ".join(f"{origin} at {self[origin]}" for origin in self) or "nowhere yet"

    def gaps_to(self, later: Mapping[TopicPartition, int]) -> list[Gap]:
        """The offsets skipped by continuing at `later`, in the partitions that both positions name."""
        return [Gap(origin, self[origin], later[origin]) for origin in self if later.get(origin, 0) > self[origin]]

    def to_json(self) -> list[list[str | int]]:
        """Rows of topic, partition, next offset, sorted."""
        return [[origin.topic, origin.partition, self[origin]] for origin in self]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[str | int]]) -> "Position":
        """The inverse of `to_json`."""
        return cls({TopicPartition(str(topic), int(part)): int(offset) for topic, part, offset in rows})


PATTERN = r"^(?:.+:[0-9]+:)?[0-9]+\.\.[0-9]+$"
"""The form of a range as text."""
_PARTS = re.compile(r"(?:(?P<topic>.+):(?P<partition>[0-9]{1,10}):)?(?P<first>[0-9]{1,19})\.\.(?P<last>[0-9]{1,19})")
_MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Consecutive offsets of one partition.

    >>> OffsetRange.parse("orders:0:118..122", ())
    OffsetRange(origin=TopicPartition(topic='orders', partition=0), first=118, last=122)
    >>> str(OffsetRange.parse("7..7", [TopicPartition("orders", 3)]))
    'orders:3:7..7'
    """

    origin: TopicPartition
    first: int
    last: int
    """Included."""

    def __str__(self) -> str:
        return f"{self.origin.topic}:{self.origin.partition}:{self.first}..{self.last}"

    def __contains__(self, record: RecordId) -> bool:
        return record.origin == self.origin and self.first <= record.offset <= self.last

    @classmethod
    def parse(cls, text: str, partitions: Collection[TopicPartition]) -> Self:
        """Read `TOPIC:PARTITION:FROM..TO`, or `FROM..TO` if there is only one of `partitions`.

        Raises:
            UsageError: the text has another form, or does not say which partition it means.
        """
        found = _PARTS.fullmatch(text)
        if found is None or not int(found["first"]) <= int(found["last"]) <= _MAX_OFFSET:
            raise UsageError(
                f"skipped records must be given as TOPIC:PARTITION:FROM..TO with FROM <= TO, found {text!r:.200}"
            )
        if found["topic"] is not None:
            origin = TopicPartition(found["topic"], int(found["partition"]))
        elif len(partitions) == 1:
            (origin,) = partitions
        else:
            listed = ", ".join(f"{origin.topic}:{origin.partition}" for origin in sorted(partitions)[:8]) or "none"
            raise UsageError(
                f"skipped records must name their partition, as in TOPIC:PARTITION:{text}, because the stream has "
                f"{len(partitions)} partitions: {listed}"
            )
        return cls(origin, int(found["first"]), int(found["last"]))

    def to_json(self) -> list[str | int]:
        """Topic, partition, first and last offset."""
        return [self.origin.topic, self.origin.partition, self.first, self.last]

    @classmethod
    def from_json(cls, row: Iterable[str | int]) -> Self:
        """The inverse of `to_json`. Raises ValueError or TypeError for anything else."""
        topic, partition, first, last = row
        return cls(TopicPartition(str(topic), int(partition)), int(first), int(last))
