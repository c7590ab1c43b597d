"""Reading of a topic from some offsets to others, with a consumer that is at hand."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kafka.errors import KafkaError

from connectors.kafka.clients import to_kafka
from streamlearn.stream.record import TopicPartition

_POLL_MS = 500


def end_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset after the last message of each partition; of the last committed one with `read_committed`."""
    origins = list(partitions)
    ends = consumer.end_offsets([to_kafka(origin) for origin in origins])
    return {origin: ends[to_kafka(origin)] for origin in origins}


def beginning_offsets(consumer: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The offset of the first message that each partition still holds."""
    origins = list(partitions)
    begins = consumer.beginning_offsets([to_kafka(origin) for origin in origins])
    return {origin: begins[to_kafka(origin)] for origin in origins}


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
