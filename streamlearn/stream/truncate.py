"""Truncation of records that are longer than `stream.max_tokens`.

    text                loses its end
    prompt + answer     `middle`: the prompt loses its middle; `truncate`: its beginning. The answer stays whole
    conversation        `middle`: keeps its system message and its last turns. Whole turns go first, oldest first; then
                        the longest text that is not an answer loses its middle, so that every header stays intact

An answer that is itself too long keeps its beginning. Images are never removed.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.record import IGNORED, RecordImage
from streamlearn.stream.template import Message, parts

DETECTION_TOKENS = 8192
"""Tokens of a truncated record's input that detection reads at most, the first and the last ones; or max_tokens."""
_MIN_TEXT_TOKENS = 32
"""Left of every text in a conversation."""
_MAX_ATTEMPTS = 32


class Draft(NamedTuple):
    """Tokens before truncation; `answer` is the index where the last completion starts, None without a prompt."""

    ids: list[int]
    labels: list[int]
    answer: int | None
    images: tuple[RecordImage, ...] = ()
    image_starts: tuple[int, ...] = ()

    def detection_input(self, max_tokens: int) -> NDArray[np.int32]:
        """What detection reads: the tokens that are not learned, all if nothing else is left. Bounded."""
        ids, labels = np.array(self.ids, dtype=np.int32), np.array(self.labels, dtype=np.int64)
        labels[:1] = IGNORED
        unlearned = ids[labels == IGNORED]
        tokens = unlearned if len(unlearned) > 1 else ids
        limit = max(DETECTION_TOKENS, max_tokens)
        return tokens if len(tokens) <= limit else np.concatenate([tokens[: limit // 2], tokens[limit // 2 - limit :]])


def too_long(limit: int, found: int, why: str = "") -> RecordError:
    """Return the error of a record that must not be truncated."""
    return RecordError(
        Reason.TOO_MANY_TOKENS, f"a record may hold at most {limit} tokens (max_tokens), found {found}{why}"
    )


def cut_tokens(draft: Draft, settings: StreamSettings, bos: list[int], margins: tuple[int, int] = (0, 0)) -> Draft:
    """Cut a draft that is too long to `max_tokens`; `margins` are tokens before and after an image that belong to it.

    Raises:
        RecordError: an image would be cut.
    """
    limit = settings.max_tokens
    ids, labels, answer, images, image_starts = draft
    if answer is None:
        return Draft(ids[:limit], labels[:limit], None)
    of_images = {
        position
        for image, start in zip(images, image_starts, strict=True)
        for position in range(start - margins[0], start + len(image.inputs.token_ids) + margins[1])
    }
    texts = [position for position in range(answer) if position not in of_images]
    kept = max(limit - (len(ids) - answer), min(answer, 1))  # tokens of the prompt
    budget = kept - (answer - len(texts))
    end = answer + limit - kept
    if budget < 0 or max(of_images, default=0) >= end:
        raise too_long(limit, len(ids), ", and images cannot be truncated")
    begin = len(bos) if bos and ids[: len(bos)] == bos else 0
    head = min(max(budget // 2, begin) if settings.overlong == "middle" else begin, budget)
    dropped = set(texts[head : len(texts) - (budget - head)])
    positions = [position for position in range(end) if position not in dropped]
    moved = tuple(start - sum(position < start for position in dropped) for start in image_starts)
    return Draft([ids[i] for i in positions], [labels[i] for i in positions], kept, images, moved)


Turns = list[tuple[Message, bool]]
"""Messages, and whether each is learned."""


def cut_conversation(
    turns: Turns,
    draft: Draft,
    limit: int,
    encode: Callable[[Turns], Draft],
    offsets: Callable[[str], Sequence[tuple[int, int]]],
) -> Draft:
    """Cut turns, then texts that are not answers, until the conversation has at most `limit` tokens, if that suffices.

    Args:
        turns: The conversation.
        draft: The conversation, encoded.
        limit: Maximum tokens.
        encode: Encodes a shorter conversation.
        offsets: Where each token of a text starts and ends.
    """
    head, exchanges = _exchanges(turns)
    droppable = [exchange for exchange in exchanges[:-1] if not any(_has_image(message) for message, _ in exchange)]
    while len(draft.ids) > limit and droppable:
        per_token = sum(map(_size, turns)) / len(draft.ids)
        sizes = itertools.accumulate(sum(map(_size, exchange)) / per_token for exchange in droppable)
        number = sum(size < 0.8 * (len(draft.ids) - limit) for size in sizes)  # rather too few than too many at once
        dropped, droppable = droppable[: max(number, 1)], droppable[max(number, 1) :]
        exchanges = [exchange for exchange in exchanges if not any(exchange is gone for gone in dropped)]
        turns = [*head, *itertools.chain.from_iterable(exchanges)]
        draft = encode(turns)
    for roles in (("user", "tool"), ("system", "developer")):
        for _ in range(_MAX_ATTEMPTS):
            if len(draft.ids) <= limit:
                return draft
            texts = [(offsets(text), turn, part) for turn, part, text in _texts(turns, roles)]
            spans, turn, part = max(texts, key=lambda text: len(text[0]), default=((), 0, 0))
            if len(spans) <= _MIN_TEXT_TOKENS:
                break
            kept = max(_MIN_TEXT_TOKENS, len(spans) - (len(draft.ids) - limit))
            turns = _with_middle_cut(turns, turn, part, spans, kept)
            draft = encode(turns)
    return draft


def _exchanges(turns: Turns) -> tuple[Turns, list[Turns]]:
    """The system messages at the start; then what follows, divided before every message of the user."""
    start = next((i for i, (message, _) in enumerate(turns) if message["role"] not in ("system", "developer")), 0)
    exchanges: list[Turns] = []
    for message, is_learned in turns[start:]:
        if message["role"] == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append((message, is_learned))
    return turns[:start], exchanges


def _has_image(message: Message) -> bool:
    return any(part["type"] == "image" for part in parts(message.get("content")))


def _size(turn: tuple[Message, bool]) -> int:
    """Characters of a message's text, and some for its header."""
    return 16 + sum(len(part.get("text", "")) for part in parts(turn[0].get("content")))


def _texts(turns: Turns, roles: Collection[str]) -> Iterator[tuple[int, int, str]]:
    """The texts of the messages with these roles, each with the indices of its message and its part."""
    for turn, (message, _) in enumerate(turns):
        if message["role"] in roles:
            for number, part in enumerate(parts(message.get("content"))):
                if "text" in part:
                    yield turn, number, part["text"]


def _with_middle_cut(turns: Turns, turn: int, part: int, spans: Sequence[tuple[int, int]], kept: int) -> Turns:
    """The turns, with `kept` tokens left of one text."""
    message, is_learned = turns[turn]
    text = parts(message["content"])[part]["text"]
    head = kept // 2
    shorter = text[: spans[head - 1][1]] + text[spans[head - kept][0] :]
    content: str | list[dict[str, str]] = shorter
    if isinstance(message["content"], list):
        content = [*message["content"][:part], {"type": "text", "text": shorter}, *message["content"][part + 1 :]]
    return [*turns[:turn], ({**message, "content": content}, is_learned), *turns[turn + 1 :]]
