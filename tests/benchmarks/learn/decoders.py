"""A decoder with one token per letter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import IGNORED, Example


class LetterDecoder(Decoder):
    """Tokens are the letters' code points; nothing is added and nothing truncated."""

    def __init__(self) -> None:
        """No tokenizer is needed."""

    def decode_value(self, value: Mapping[str, Any]) -> Example:
        """Decode prompt and completion, or two messages."""
        if "messages" in value:
            prompt, answer = (message["content"] for message in value["messages"])
        else:
            prompt, answer = value["prompt"], value["completion"]
        ids = [ord(letter) for letter in prompt + answer]
        labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
        return Example(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))

    @property
    def stop(self) -> frozenset[int]:
        """One letter ends an answer."""
        return frozenset({ord("#")})

    def text(self, ids: Sequence[int]) -> str:
        """Join the letters."""
        return "".join(map(chr, ids))
