"""Where the logs of partitions begin and end, and reading from some offsets to others, with a consumer at hand.

kafka-python waits for a leader if none of the requested partitions has one. If some have, it raises a bare KeyError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kafka.errors import KafkaError, LeaderNotAvailableError

from connectors.kafka.clients import to_kafka
from streamlearn.stream.record import TopicPartition

_POLL_MS = 500


def end_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset after the last message of each partition; of the last committed one with `read_committed`.

    Raises:
        KafkaError: a partition has no leader, or the cluster does not answer.
    """
    origins = list(partitions)
    return _complete(available_end_offsets(consumer, origins), origins)


def beginning_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset of the first message that each partition still holds. Raises what `end_offsets` raises."""
    origins = list(partitions)
    return _complete(available_beginning_offsets(consumer, origins), origins)


def available_end_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """`end_offsets` of the partitions that have a leader; by default the timeout is `request_timeout_ms`.

    Raises:
        KafkaError: no partition has a leader, or the cluster does not answer.
    """
    return _available(consumer.end_offsets, partitions, timeout_ms)


def available_beginning_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
) -> dict[TopicPartition, int]:
    """`beginning_offsets` of the partitions that have a leader. Raises what `available_end_offsets` raises."""
    return _available(consumer.beginning_offsets, partitions, timeout_ms)


def read_between(
    consumer: Any, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], *, timeout_ms: int
) -> Iterator[Any]:
    """Yield every message from `starts` to `ends`, in order per partition.

    Raises:
        KafkaError: nothing came for `timeout_ms`.
    """
    unread = {to_kafka(origin): ends[origin] for origin, start in starts.items() if start < ends[origin]}
    consumer.assign(list(unread))
    for partition in unread:
        consumer.seek(partition, starts[TopicPartition(*partition)])
    remaining_ms = timeout_ms
    while unread:
        messages = consumer.poll(timeout_ms=_POLL_MS)
        for partition, batch in messages.items():
            yield from (message for message in batch if message.offset < ends[TopicPartition(*partition)])
        remaining_ms = timeout_ms if messages else remaining_ms - _POLL_MS
        if remaining_ms <= 0:
            raise KafkaError(f"no message for {timeout_ms} ms before the end of the topic")
        unread = {partition: end for partition, end in unread.items() if consumer.position(partition) < end}


def _available(
    request: Callable[..., Mapping[Any, int]], partitions: Iterable[TopicPartition], timeout_ms: int | None
) -> dict[TopicPartition, int]:
    """Ask again without a partition that has no leader, until there is none of them."""
    asked = [to_kafka(origin) for origin in partitions]
    while True:
        try:
            offsets = request(asked, timeout_ms=timeout_ms)
        except KeyError as error:
            asked.remove(error.args[0])
        else:
            return {TopicPartition(*partition): offset for partition, offset in offsets.items()}


def _complete(offsets: dict[TopicPartition, int], partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return `offsets` if they have all partitions.

    Raises:
        LeaderNotAvailableError: they do not.
    """
    missing = [str(origin) for origin in partitions if origin not in offsets]
    if missing:
        raise LeaderNotAvailableError(
            f"every partition must have a leader, {', '.join(missing)} has none. Start a broker that holds a replica"
        )
    return offsets
