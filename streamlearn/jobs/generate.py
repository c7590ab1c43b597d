"""Text generation for a request, token by token."""

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from streamlearn.jobs.queue import (
    FinishReason,
    GenerateJob,
    GenerateResult,
    GenerationStart,
    GenerationStream,
    PromptInput,
    Sampling,
)
from streamlearn.learner.generate import NucleusSampler, TokenChoice, decode, most_likely
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RoutedInput
from streamlearn.shift.features import input_of_prompt
from streamlearn.status import Requested
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Prompt

RouteInputs = Callable[[Sequence[NDArray[np.int32]], Requested], list[RoutedInput]]
"""Finds what answers each input; raises UnknownRegimeError if the requested regime cannot answer."""


def generate(
    job: GenerateJob, learner: Learner, decoder: Decoder, route_inputs: RouteInputs
) -> Generator[None, None, GenerateResult]:
    """Continue a prompt or answer a conversation.

    Raises:
        RecordError: the prompt cannot be encoded.
        UnknownRegimeError: the requested regime cannot answer.
    """
    step = learner.number
    prompt = encoded(job, decoder)
    [routed] = route_inputs([input_of_prompt(prompt)], job.requested)
    if job.stream is not None:
        job.stream.begin(GenerationStart(step, len(prompt), routed.route))
    text = _Text(decoder, job.stop, job.stream)
    [output] = yield from decode(
        learner.model,
        [prompt],
        [job.max_new_tokens],
        decoder.stop,
        learner.device,
        [routed.slot],
        choose=_choice(job.sampling, learner.device),
        on_token=text.add,
    )
    text.finish()
    reason: FinishReason = "length" if len(output) == job.max_new_tokens and not text.stopped else "stop"
    return GenerateResult(step, len(prompt), routed.route, "".join(text.pieces), len(output), reason)


def encoded(given: PromptInput, decoder: Decoder) -> Prompt:
    """The tokens and images of a prompt or a conversation.

    Raises:
        RecordError: it cannot be encoded.
    """
    return decoder.prompt(given.prompt if given.prompt is not None else given.messages or (), given.image)


def _choice(sampling: Sampling | None, device: torch.device) -> TokenChoice:
    if sampling is None:
        return most_likely
    return NucleusSampler(sampling.temperature, sampling.top_p, sampling.seed, device)


class _Text:
    """The text of the tokens up to a stop string, in pieces that hold whole characters."""

    def __init__(self, decoder: Decoder, stop: tuple[str, ...], stream: GenerationStream | None) -> None:
        self._incremental = IncrementalText(decoder.text)
        self._stop = StopStrings(stop)
        self._stream = stream
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def add(self, _: int, token: int) -> bool:
        """Add the next token; return whether the text continues."""
        self._write(self._stop.add(self._incremental.add(token)))
        return not self.stopped

    def finish(self) -> None:
        if not self.stopped:
            self._write(self._stop.add(self._incremental.flush()))
        if not self.stopped:
            self._write(self._stop.flush())

    def _write(self, piece: str) -> None:
        self.pieces.append(piece)
        if self._stream is not None:
            self._stream.write(piece)


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for bytes that are not a character, or not yet


class IncrementalText:
    """Decodes tokens to pieces of text that join to the text of all tokens.

    A token is decoded after those of the piece before, because tokenizers treat the first token of a text differently.
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str]) -> None:
        """`to_text` decodes tokens; the text of more tokens extends the text of fewer."""
        self._to_text = to_text
        self._tokens: list[int] = []  # those of the last piece, then those without a piece yet
        self._num_written = 0
        self._written = ""

    def add(self, token: int) -> str:
        """The text that the token completes; empty in the middle of a character."""
        self._tokens.append(token)
        piece = self.flush()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._tokens = self._tokens[self._num_written :]
            self._num_written = len(self._tokens)
            self._written = self._to_text(self._tokens)
        return piece

    def flush(self) -> str:
        """The rest at the end of the text: incomplete characters."""
        return self._to_text(self._tokens)[len(self._written) :]


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    The first is the one that ends first, the longest of several that end together: the result depends on the text, not
    on its pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._pending = ""
        self.found = False
        """Whether the text has ended."""

    def add(self, piece: str) -> str:
        """The next part of the text that certainly precedes a stop string."""
        text = self._pending + piece
        places = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if places:
            _, start = min(places)
            self.found, self._pending = True, ""
            return text[:start]
        cut = len(text) - self._beginning_at_end_of(text)
        self._pending = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The rest of a text that ends without a stop string."""
        rest, self._pending = self._pending, ""
        return rest

    def _beginning_at_end_of(self, text: str) -> int:
        """Length of the longest end of `text` with which a string begins."""
        lengths = (n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)
