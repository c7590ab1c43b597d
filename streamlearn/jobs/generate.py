"""Text generation for a request, token by token."""

import time
from collections.abc import Callable, Generator

from streamlearn.jobs.evaluate import RouteInputs
from streamlearn.jobs.queue import GenerateJob, PromptInput
from streamlearn.jobs.results import GenerateResult
from streamlearn.learner.decoding import decode
from streamlearn.learner.learner import Learner
from streamlearn.shift.featurizer import input_of_prompt
from streamlearn.stream.decode import Decoder, Prompt


def generate(
    job: GenerateJob,
    learner: Learner,
    decoder: Decoder,
    route_inputs: RouteInputs,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, GenerateResult]:
    """Continue a prompt or answer a conversation, greedily.

    Raises:
        RecordError: the prompt cannot be encoded.
    """
    started, step = clock(), learner.number
    prompt = encoded(job, decoder)
    [routed] = route_inputs([input_of_prompt(prompt)])
    outputs = yield from decode(
        learner.model, [prompt], [job.max_new_tokens], decoder.stop, learner.device, [routed.slot]
    )
    text = decoder.text(outputs[0])
    return GenerateResult(step=step, text=text, tokens=len(outputs[0]), route=routed.route, seconds=clock() - started)


def encoded(given: PromptInput, decoder: Decoder) -> Prompt:
    """The tokens and images of a prompt or a conversation.

    Raises:
        RecordError: it cannot be encoded.
    """
    return decoder.prompt(given.prompt if given.prompt is not None else given.messages or (), given.image)
