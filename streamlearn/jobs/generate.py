"""Text generation for a request, token by token."""

import time
from collections.abc import Callable, Generator

import torch

from streamlearn.jobs.evaluate import RouteInputs
from streamlearn.jobs.generation_stream import GenerationStart, GenerationStream
from streamlearn.jobs.queue import GenerateJob, PromptInput, Sampling
from streamlearn.jobs.results import GenerateResult
from streamlearn.jobs.stop_strings import StopStrings
from streamlearn.learner.decoding import decode
from streamlearn.learner.learner import Learner
from streamlearn.learner.token_choice import NucleusSampler, TokenChoice, most_likely
from streamlearn.shift.featurizer import input_of_prompt
from streamlearn.stream.decode import Decoder, Prompt
from streamlearn.stream.incremental_text import IncrementalText


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
