"""Text generation for a request, token by token."""

import time
from collections.abc import Callable, Generator

from streamlearn.jobs.evaluate import AssignSlots
from streamlearn.jobs.queue import GenerateJob
from streamlearn.jobs.results import GenerateResult
from streamlearn.learner.decoding import decode_greedily
from streamlearn.learner.learner import Learner
from streamlearn.shift.featurizer import input_of_prompt
from streamlearn.stream.decode import Decoder


def generate(
    job: GenerateJob,
    learner: Learner,
    decoder: Decoder,
    assign_slots: AssignSlots,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, GenerateResult]:
    """Continue a prompt or answer a conversation, greedily.

    Raises:
        RecordError: the prompt cannot be encoded.
    """
    started, step = clock(), learner.number
    prompt = decoder.prompt(job.prompt if job.prompt is not None else job.messages or (), job.image)
    slots = assign_slots([input_of_prompt(prompt)])
    outputs = yield from decode_greedily(
        learner.model, [prompt], [job.max_new_tokens], decoder.stop, learner.device, slots
    )
    text = decoder.text(outputs[0])
    return GenerateResult(step=step, text=text, tokens=len(outputs[0]), seconds=clock() - started)
