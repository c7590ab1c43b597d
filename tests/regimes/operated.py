"""Runs in which an operator acts between two steps, as the daemon applies it: the act, then a snapshot."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from streamlearn.adapters.presets import regime_adapter
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import RegimeBusyError
from streamlearn.learner.learner import Step
from streamlearn.settings import Settings
from streamlearn.status import Status
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import daemon_of, opened
from tests.regimes.shifting_streams import Silent, tensors_of

Act = Callable[[Daemon], Any]


class Operator(Silent):
    """Acts after the step with a number, or after the next one at which it can be done, then has a snapshot written.

    What is done is removed from `acts`, which are in order.
    """

    def __init__(self, acts: dict[int, Act], check: Act | None = None, dies_after: list[int] | None = None) -> None:
        self.daemon: Daemon | None = None
        self._acts = acts
        self._check = check
        self._dies_after = dies_after if dies_after is not None else []

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        assert self.daemon is not None
        while self._acts and next(iter(self._acts)) <= step.number:
            due, act = next(iter(self._acts.items()))
            try:
                act(self.daemon)
            except RegimeBusyError:
                break
            del self._acts[due]
            self.daemon.save()
        if self._check is not None:
            self._check(self.daemon)
        if self._dies_after and step.number >= self._dies_after[0]:
            self._dies_after.pop(0)
            raise KeyboardInterrupt


def operate(settings: Settings, acts: dict[int, Act], **options: Any) -> tuple[dict[str, Tensor], Components]:
    """Learn to the end; every tensor that the next step would depend on."""
    operator = Operator(acts, **options)
    with opened(settings) as components:
        operator.daemon = daemon_of(components, operator)
        operator.daemon.run()
        return tensors_of(components), components


def adapter(state: dict[str, Tensor], slot: int) -> dict[str, Tensor]:
    """Weights and moments of one regime."""
    name = regime_adapter(slot)
    marks = (f"{name}: ", f"optimizer.{name}/")
    return {key: tensor for key, tensor in state.items() if key.startswith(marks)}


def assert_consistent(daemon: Daemon) -> None:
    """Whatever is kept by slot or number is kept of the same regimes."""
    adaptation, learner = daemon.adaptation, daemon.learner
    numbers = adaptation.numbers
    known = set(numbers.values())
    assert len(known) == len(numbers) <= daemon.components.settings.shift.max_regimes
    assert adaptation.state.current is None or adaptation.state.current in numbers
    assert all(regime.slot == slot for slot, regime in adaptation.by_slot.items())
    if learner.per_regime:
        assert set(learner.revisions) == {regime_adapter(slot) for slot in numbers or [0]}
        assert set(learner.model.peft_config) == set(learner.revisions)
        assert all(parameter.requires_grad for parameter in learner.optimizer.parameters())
    assert [regime.number for regime in adaptation.status().regimes] == sorted(known)
