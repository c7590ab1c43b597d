"""Jobs between training steps: their weights, their time budget and their failures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.controls import Control
from streamlearn.errors import AdapterGoneError
from streamlearn.events import Event
from streamlearn.jobs.queue import (
    ControlJob,
    ControlResult,
    EvalJob,
    EvalResult,
    GenerateJob,
    GenerateResult,
    GenerationStream,
    Job,
    JobQueue,
    QueueClosedError,
    Sampling,
    SnapshotJob,
    SnapshotResult,
)
from streamlearn.jobs.runner import JobRunner
from streamlearn.learner.cache import PinnedWeights
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Batch
from tests.doubles import random_examples, tiny_backbone
from tests.jobs.conftest import first_regime

PIECE_S = 1.0  # duration of one forward pass on the runner's clock
EXAMPLES: tuple[dict[str, Any], ...] = (
    {"prompt": "what is the capital", "completion": " of France?"},
    {"text": "hello world"},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fox"}]},
)
SCORE = EvalJob(EXAMPLES, generate=False, max_new_tokens=4)
SCORE_AND_GENERATE = EvalJob(EXAMPLES, generate=True, max_new_tokens=4)
GENERATE = GenerateJob("the quick brown", None, max_new_tokens=5)
SAMPLE = GenerateJob(
    "the quick brown",
    None,
    max_new_tokens=5,
    sampling=Sampling(temperature=1.5, top_p=0.95, seed=3),
    stop=("never there",),
    stream=GenerationStream(lambda: None),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("qwen3"))


@dataclass
class Environment:
    """A runner, its queue, a learner that it must not disturb, and a clock that forward passes advance."""

    backbone: Backbone
    now: float = 0.0
    save: Callable[[], SnapshotResult] = lambda: SnapshotResult(name="none", step=0)

    def __post_init__(self) -> None:
        self.controls: list[Control] = []
        model = attach(self.backbone.model, resolve(AdapterSettings(num_experts=2)), seed=0)
        self.learner = Learner(model, LearnerSettings(lr=3e-2), self.backbone.device, clock=lambda: 0.0)
        self.jobs = JobQueue(8)
        decoder = Decoder(self.backbone.tokenizer, StreamSettings(), self.backbone.vocab_size)
        self.runner = JobRunner(
            self.jobs,
            self.learner,
            decoder,
            first_regime,
            self._save,
            self._control,
            pack_tokens=1,
            clock=lambda: self.now,
        )
        self.learner.forward.get_decoder().register_forward_hook(self._pass_time)

    def _save(self) -> SnapshotResult:
        return self.save()

    def _control(self, job: ControlJob) -> ControlResult:
        self.controls.append(job.control)
        return ControlResult(
            control=job.control.verb, changed=True, paused=False, pinned=(), skipped_records=(), snapshot=None
        )

    def _pass_time(self, *_: object) -> None:
        self.now += PIECE_S

    def train(self, steps: int = 1) -> list[float]:
        """Make training steps, which also advance the clock."""
        batches = (Batch((), random_examples([6, 4], seed=self.learner.number)) for _ in range(steps))
        return [self.learner.step(batch.examples).loss for batch in batches]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.learner.optimizer.parameters()]

    def run_to_end(self, job: Job) -> Any:
        """A job's result, without a step in between."""
        future = self.jobs.submit(job)
        self.runner.serve(1e9)
        return future.result(0)

    def spread(self, job: Job) -> Any:
        """A job's result when each of several pieces is followed by a training step."""
        future = self.jobs.submit(job)
        first = self.learner.number
        while not future.done():
            self.runner.serve(PIECE_S)
            self.train()
        assert self.learner.number - first > 2
        return future.result(0)


@pytest.fixture
def env(folder: Path) -> Environment:
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    env = Environment(load(settings, outline(settings)))
    env.train(3)
    return env


def untimed(result: EvalResult | GenerateResult) -> dict[str, Any]:
    return asdict(result) if isinstance(result, GenerateResult) else result.model_dump(exclude={"seconds"})


@pytest.mark.parametrize(
    "job",
    [SCORE_AND_GENERATE, SAMPLE],
    ids=["score and generate", "sample"],
)
def test_a_job_spread_over_steps_gives_the_figures_of_its_start(env: Environment, job: Job) -> None:
    """Training continues after every piece, yet all figures, texts and the step are those of the job's start."""
    wanted = env.run_to_end(job)
    assert untimed(env.spread(job)) == untimed(wanted)
    later = env.run_to_end(job)
    assert later.step > wanted.step
    assert untimed(later) != {**untimed(wanted), "step": later.step}  # the live weights have changed


def test_a_job_names_the_step_of_its_weights(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if copying the weights uses up the budget: the step is the one at which they were copied."""
    pin = env.learner.pin

    def slow_pin() -> PinnedWeights:
        env.now += 10 * PIECE_S
        return pin()

    wanted = env.run_to_end(SCORE)
    monkeypatch.setattr(env.learner, "pin", slow_pin)
    spread = env.spread(SCORE)
    assert untimed(spread) == untimed(wanted)
    assert wanted.seconds == 3 * PIECE_S
    assert spread.seconds == 13 * PIECE_S, "its forward passes and the copy, not the steps between them"


def test_serving_changes_no_bit_of_training(folder: Path, env: Environment) -> None:
    """A learner that served jobs ends with the same weights as one that did not."""
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    undisturbed = Environment(load(settings, outline(settings)))
    undisturbed.train(3)
    env.spread(SCORE_AND_GENERATE)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    env.spread(SAMPLE)
    assert torch.equal(torch.random.get_rng_state(), before)
    undisturbed.train(env.learner.number - undisturbed.learner.number)
    assert all(torch.equal(one, other) for one, other in zip(env.weights(), undisturbed.weights(), strict=True))


def test_a_job_whose_regime_is_replaced_fails_and_can_be_repeated(env: Environment) -> None:
    """Between two of its pieces; it is not finished by the weights of another regime."""
    future = env.jobs.submit(GENERATE)
    env.runner.serve(PIECE_S)
    assert not future.done()
    env.learner.add_regime(0, seed=9)
    with capture_logs() as logs:
        env.runner.serve(1e9)
    with pytest.raises(AdapterGoneError, match="repeat the request"):
        future.result(0)
    assert [log["event"] for log in logs] == [Event.JOB_FAILED]
    assert env.run_to_end(GENERATE).step == env.learner.number


def test_closing_fails_the_unfinished_job(env: Environment) -> None:
    """So that its client is answered at once. Closing twice is safe."""
    future = env.jobs.submit(SCORE)
    env.runner.serve(PIECE_S)
    assert (env.runner.busy, future.done()) == (True, False)
    env.runner.close()
    env.runner.close()
    with pytest.raises(QueueClosedError, match="before it finished this job"):
        future.result(0)
    assert not env.runner.busy


@pytest.mark.parametrize(("budget_s", "pieces"), [(0.0, 0), (2.5, 3), (1e9, 9)])
def test_a_budget_is_overrun_by_one_piece_at_most(env: Environment, budget_s: float, pieces: int) -> None:
    """Work ends with the first piece that reaches the budget; the time spent is returned."""
    for job in (SCORE, SCORE, SCORE):
        env.jobs.submit(job)
    assert env.runner.serve(budget_s) == pieces * PIECE_S
    assert env.runner.busy == (pieces < 9)


def test_a_snapshot_is_written_with_the_live_weights(env: Environment) -> None:
    """Also right after a job that had older weights swapped in."""
    seen: list[list[Tensor]] = []

    def save() -> SnapshotResult:
        seen.append(env.weights())
        return SnapshotResult(name="now", step=env.learner.number)

    env.save = save
    evaluation = env.jobs.submit(SCORE)
    snapshot = env.jobs.submit(SnapshotJob())
    env.runner.serve(PIECE_S)
    old = env.weights()
    env.train(2)
    live = env.weights()
    env.runner.serve(1e9)
    scored = evaluation.result(0)
    assert isinstance(scored, EvalResult)
    assert scored.step == 3
    assert snapshot.result(0) == SnapshotResult(name="now", step=5)
    assert all(torch.equal(one, other) for one, other in zip(seen[0], live, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(seen[0], old, strict=True))


@contextmanager
def failing_in_the_middle(env: Environment) -> Iterator[None]:
    """The second forward pass raises, as if out of memory."""
    passes = iter([None, MemoryError("no room")])

    def hook(*_: object) -> None:
        if (error := next(passes, None)) is not None:
            raise error

    with env.learner.forward.get_decoder().register_forward_hook(hook):
        yield


def test_a_failing_job_leaves_the_learner_unchanged(env: Environment) -> None:
    """Its client gets an error, the event is logged, the live weights are restored and the next job runs."""
    before = env.weights()
    addresses = [parameter.data_ptr() for parameter in env.learner.optimizer.parameters()]
    wanted = env.run_to_end(SCORE)
    with capture_logs() as events, failing_in_the_middle(env):
        future = env.jobs.submit(SCORE)
        env.runner.serve(1e9)
    assert isinstance(future.exception(0), MemoryError)
    assert [event["event"] for event in events] == [Event.JOB_FAILED]
    assert [parameter.data_ptr() for parameter in env.learner.optimizer.parameters()] == addresses
    assert all(torch.equal(one, other) for one, other in zip(before, env.weights(), strict=True))
    assert not env.runner.busy
    assert untimed(env.run_to_end(SCORE)) == untimed(wanted)


def test_a_cancelled_job_is_dropped(env: Environment) -> None:
    """A running job ends without another forward pass, a queued one never starts, and nothing is logged."""
    running, queued = env.jobs.submit(SCORE), env.jobs.submit(SCORE)
    env.runner.serve(PIECE_S)
    running.cancel()
    queued.cancel()
    before = env.now
    with capture_logs() as events:
        env.runner.serve(1e9)
    assert env.now == before
    assert events == []
    assert not env.runner.busy
