"""The regime of each prompt of a request, and what would answer it."""

import time
from collections.abc import Callable, Generator

from streamlearn.errors import RecordError
from streamlearn.jobs.evaluate import RouteInputs
from streamlearn.jobs.generate import encoded
from streamlearn.jobs.queue import ExampleError, RouteJob
from streamlearn.jobs.results import RouteResult
from streamlearn.learner.learner import Learner
from streamlearn.shift.features import input_of_prompt
from streamlearn.stream.decode import Decoder


def route(
    job: RouteJob,
    learner: Learner,
    decoder: Decoder,
    route_inputs: RouteInputs,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, RouteResult]:
    """Route prompts by their tokens, without a forward pass; yields after every prompt.

    Raises:
        ExampleError: a prompt cannot be encoded; the message has its index.
    """
    started, inputs = clock(), []
    for index, prompt in enumerate(job.prompts):
        try:
            inputs.append(input_of_prompt(encoded(prompt, decoder)))
        except RecordError as error:
            raise ExampleError(index, error, field="prompts") from error
        yield
    routes = tuple(routed.route for routed in route_inputs(inputs))
    return RouteResult(step=learner.number, routes=routes, seconds=clock() - started)
