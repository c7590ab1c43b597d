"""Shortening of records that are longer than the backbone may read.

TRACE's long prompts have the instruction at their head and the cue for the answer at their tail; so have SuperNI's.
Truncation of the stream would take away the head. Here a prompt loses its middle, as in LongBench (arXiv 2308.14508).

A prompt may have `max_tokens` less the tokens of its task's longest training answer, of which at most a quarter of
`max_tokens` is kept free. It is the same for every record of a task, so that no prompt tells how long its answer is. An
answer for which there is still no space loses its end; references keep it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.learn.suite import Json, Suite
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example

GAP = " ... "
"""Stands for what was cut out."""


@dataclass(frozen=True)
class _Record:
    """A record's two texts, and the way back."""

    prompt: str
    answer: str
    with_texts: Callable[[str, str], Json]


def shortened(suite: Suite, decoder: Decoder, max_tokens: int) -> Suite:
    """Return the suite with every record at most `max_tokens` long; records with images are left as they are.

    Args:
        suite: What to shorten.
        decoder: A decoder that does not truncate.
        max_tokens: Maximum tokens of prompt and answer.
    """
    known: dict[int, Json] = {}
    for task, records in suite.train.items():
        prompt_tokens = _prompt_tokens(records, decoder, max_tokens)
        for record in (*records, *suite.tests[task]):
            known[id(record)] = _shorten(record, decoder, max_tokens, prompt_tokens)

    def each(records: Sequence[Json]) -> tuple[Json, ...]:
        return tuple(known[id(record)] for record in records)

    return replace(
        suite,
        segments=tuple(replace(segment, records=each(segment.records)) for segment in suite.segments),
        tests={task: each(records) for task, records in suite.tests.items()},
        train={task: each(records) for task, records in suite.train.items()},
    )


def _prompt_tokens(records: Sequence[Json], decoder: Decoder, max_tokens: int) -> int:
    examples = [decoder.decode_value(record) for record in records if "image" not in record]
    longest = max((len(example) - example.prompt_length for example in examples), default=0)
    return max_tokens - min(longest, max_tokens // 4)


def _shorten(record: Json, decoder: Decoder, max_tokens: int, prompt_tokens: int) -> Json:
    if "image" in record:
        return record
    example = decoder.decode_value(record)
    if example.prompt_length <= prompt_tokens and len(example) <= max_tokens:
        return record
    texts = _texts(record)

    def decoded(prompt: str, answer: str) -> Example:
        return decoder.decode_value(texts.with_texts(prompt, answer))

    def fits(size: int) -> bool:
        return decoded(without_middle(texts.prompt, size), "a").prompt_length <= prompt_tokens

    prompt, answer = texts.prompt, texts.answer
    if example.prompt_length > prompt_tokens:
        prompt = without_middle(prompt, _largest(len(prompt), fits))
    if len(decoded(prompt, answer)) > max_tokens:
        answer = answer[: _largest(len(answer), lambda size: len(decoded(prompt, answer[:size])) <= max_tokens)]
    return texts.with_texts(prompt, answer)


def _texts(record: Json) -> _Record:
    if "messages" not in record:
        return _Record(
            record["prompt"],
            record["completion"],
            lambda prompt, answer: {**record, "prompt": prompt, "completion": answer},
        )
    user, assistant = record["messages"]
    return _Record(
        user["content"],
        assistant["content"],
        lambda prompt, answer: {
            **record,
            "messages": [{**user, "content": prompt}, {**assistant, "content": answer}],
        },
    )


def without_middle(text: str, size: int) -> str:
    """Return a text's first and last characters, `size` together, around `GAP`.

    >>> without_middle("one two three four", 8)
    'one  ... four'
    """
    head = size // 2
    return text[:head] + GAP + text[len(text) - (size - head) :]


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits, if smaller ones fit too; 1 is not tried."""
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
