"""Text generation for a request, token by token."""

import time
from collections.abc import Callable, Generator, Sequence

import torch

from streamlearn.jobs.evaluate import RouteInputs
from streamlearn.jobs.queue import GenerateJob, GenerationStart, GenerationStream, PromptInput, Sampling
from streamlearn.jobs.results import GenerateResult
from streamlearn.learner.generate import NucleusSampler, TokenChoice, decode, most_likely
from streamlearn.learner.learner import Learner
from streamlearn.shift.features import input_of_prompt
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Prompt

MAX_STRINGS = 4
MAX_CHARS = 256
"""Of one string: the last characters of a text are compared with every beginning of every string."""


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    The first is the one that ends first, the longest of several that end together: what is found depends on the text,
    not on its pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False
        """Whether the text has ended."""

    def add(self, piece: str) -> str:
        """The next part of the text that is certain to be in front of a stop string."""
        text = self._held + piece
        places = [(start + len(each), start) for each in self._strings if (start := text.find(each)) >= 0]
        if places:
            _, start = min(places)
            self.found, self._held = True, ""
            return text[:start]
        cut = len(text) - self._beginning_at_end_of(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The rest of a text that ends without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning_at_end_of(self, text: str) -> int:
        """Length of the longest end of `text` with which a string begins."""
        lengths = (n for each in self._strings for n in range(1, len(each)) if text.endswith(each[:n]))
        return max(lengths, default=0)


_INCOMPLETE = "�"  # what a tokenizer writes for bytes that are not a character, or not yet


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


def generate(
    job: GenerateJob,
    learner: Learner,
    decoder: Decoder,
    route_inputs: RouteInputs,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, GenerateResult]:
    """Continue a prompt or answer a conversation.

    Raises:
        RecordError: the prompt cannot be encoded.
        UnknownRegimeError: the requested regime cannot answer.
    """
    started, step = clock(), learner.number
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
    return GenerateResult(
        step=step,
        text="".join(text.pieces),
        tokens=len(output),
        prompt_tokens=len(prompt),
        finish_reason="length" if len(output) == job.max_new_tokens and not text.stopped else "stop",
        route=routed.route,
        seconds=clock() - started,
    )


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
        """Whether a stop string was found."""
        return self._stop.found

    def add(self, _: int, token: int) -> bool:
        """Take in the next token; return whether the text continues."""
        self._write(self._stop.add(self._incremental.add(token)))
        return not self.stopped

    def finish(self) -> None:
        """Write what was held back."""
        if not self.stopped:
            self._write(self._stop.add(self._incremental.flush()))
        if not self.stopped:
            self._write(self._stop.flush())

    def _write(self, piece: str) -> None:
        self.pieces.append(piece)
        if self._stream is not None:
            self._stream.write(piece)
