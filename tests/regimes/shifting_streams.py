"""Streams of tasks that shift, runs over them, and what observes a run."""

from types import SimpleNamespace
from typing import Any

import orjson
from torch import Tensor

from streamlearn.daemon.build import Components
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.learner import Step
from streamlearn.regimes.regime import Regime
from streamlearn.regimes.regimes import Regimes
from streamlearn.regimes.report import ShiftReport
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import Status
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import regime_tensors, state_of

PER_TASK = 90


TASKS = {
    "animals": ("the fox and the dog met number {} in the", " forest"),
    "sums": ("add {0} to {0} and say what it is:", " a sum"),
    "cities": ("What is the capital? France has {} towns. Paris?", " Paris"),
}


SHAPES: dict[str, dict[str, Any]] = {
    "adapter of its own": {},
    "cp-moe": {"adapter": {"preset": "cp-moe"}},
    "one adapter": {"adapter": {"per_regime": False}, "consolidate": {"anchor_strength": 10.0}},
}


MIXED = (
    "Look at the animals of the wood and say where number {} of them met the old dog last night:",
    "Add these two amounts without a calculator, {0} and {0}, then write their sum as one figure below.",
)


def stream(*tasks: str, per_task: int = PER_TASK, meta: str = "m") -> list[bytes]:
    """Records of one task after another; a task that returns continues its numbering."""
    rows = []
    for number, task in enumerate(tasks):
        prompt, completion = TASKS[task]
        for i in range(per_task):
            value = {"prompt": prompt.format(1000 + (4321 * number + 7919 * i) % 9000), "completion": completion}
            rows.append(orjson.dumps({**value, "meta": {meta: i}}))
    return rows


def mixed(number: int) -> list[bytes]:
    """Records of two producers in turns, from the first record on."""
    prompts = [MIXED[i * 7 % 5 % 2].format(1000 + 7919 * i % 9000) for i in range(number)]
    return [orjson.dumps({"prompt": prompt, "completion": " yes"}) for prompt in prompts]


def run(settings: Settings) -> tuple[dict[str, Tensor], Components]:
    """Learn to the end; every tensor that the next step would depend on."""
    with opened(settings) as components:
        daemon_of(components).run()
        return tensors_of(components), components


def tensors_of(components: Components) -> dict[str, Tensor]:
    """Copies of all that a snapshot holds."""
    learner = components.learner
    weights = {f"{adapter}: {n}": w for adapter in learner.revisions for n, w in learner.weights(adapter).items()}
    state = {**state_of(learner), **regime_tensors(components.adaptation), **weights}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class Silent:
    """An observer that does nothing."""

    def on_start(self, status: Status) -> None: ...

    def on_step(self, batch: Batch, step: Step, status: Status) -> None: ...

    def on_shift(self, entry: ShiftReport) -> None: ...

    def on_snapshot(self, info: SnapshotInfo) -> None: ...


def bare_regimes(*numbers: int) -> Regimes:
    """Regimes with these numbers, of which nothing was learned, without a model."""
    learner: Any = SimpleNamespace(routes_by_regime=True, per_regime=True, cache=AdapterCache(), number=0)
    settings = Settings.model_validate({"source": {"jsonl": {"path": "unused"}}, "state": "unused"})
    regimes = Regimes(learner, settings, lambda example, _: example, str)
    regimes.state.regimes = {slot: Regime(number, slot) for slot, number in enumerate(numbers)}
    return regimes
