"""Learners on the tiny backbone: a fixture, and comparison of two of them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.presets import PRESETS, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.baselines.consolidate import BaselineHooks
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.learner import Compute, Learner
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    ConsolidateSettings,
    LearnerSettings,
    ProbeSettings,
    Settings,
    ShiftSettings,
)
from streamlearn.snapshot.parts import dump_components
from tests.doubles import tiny_backbone

REGIMES = 4
"""Regime slots; where each regime has an adapter of its own, all have one."""


class MakeLearner(Protocol):
    """Factory of learners; `changes` override the preset's objective, `settings` the learner settings.

    `consolidate` are settings of that section.
    """

    def __call__(
        self,
        *,
        preset: Any = "mh-moe",
        seed: int = 0,
        changes: Mapping[str, Any] | None = None,
        consolidate: Mapping[str, Any] | None = None,
        cache: AdapterCache | None = None,
        compute: Compute | None = None,
        dropout: float = 0.0,
        **settings: Any,
    ) -> Learner: ...


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def make_learner(tiny: Path) -> MakeLearner:
    return partial(tiny_learner, tiny)


def tiny_learner(
    folder: Path,
    *,
    preset: Any = "mh-moe",
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    consolidate: Mapping[str, Any] | None = None,
    cache: AdapterCache | None = None,
    mesh: DeviceMesh | None = None,
    compute: Compute | None = None,
    dropout: float = 0.0,
    **settings: Any,
) -> Learner:
    """A learner on the tiny backbone in a folder; see `MakeLearner`, and `load` about `mesh`.

    Nothing is dropped by default: draws differ with the parts that a batch is computed in.
    """
    backbone_settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    backbone = load(backbone_settings, outline(backbone_settings), mesh=mesh)
    merged = replace(PRESETS[preset].objective, **(changes or {}))
    regimes = REGIMES if merged.bias != "none" else 0
    model = attach(backbone.model, resolve(AdapterSettings(preset=preset, dropout=dropout), regimes=regimes), seed)
    whole = Settings(
        source={"jsonl": {"path": folder / "stream.jsonl"}},
        seed=seed,
        learner=LearnerSettings(**{"lr": 1e-2, **settings}),
        consolidate=ConsolidateSettings(**(consolidate or {})),
        probe=ProbeSettings(warmup_tokens=300),
        shift=ShiftSettings(max_regimes=REGIMES),
    )
    learner = Learner(
        model,
        whole.learner,
        backbone.device,
        clock=lambda: 0.0,
        router_lr=merged.router_lr,
        cache=cache,
        compute=compute,
    )
    learner.hooks = BaselineHooks(learner, merged, whole)
    for slot in range(REGIMES if learner.per_regime else 0):
        learner.add_regime(slot, seed + slot)
    return learner


def timeless(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot's tensors without those that depend on time: scores of hold-out records, durations of probes."""
    timed = ("regimes.regimes[].scores.", "regimes.reports[].probe_seconds")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(timed)}


def regime_tensors(regimes: Regimes) -> dict[str, Tensor]:
    """The tensors that a snapshot has about regimes, without those that depend on time."""
    tensors, _ = dump_components({"regimes": regimes.save()})
    return timeless(tensors)


def hooks_of(learner: Learner) -> BaselineHooks:
    assert isinstance(learner.hooks, BaselineHooks)
    return learner.hooks


def state_of(learner: Learner) -> dict[str, Tensor]:
    """All that a snapshot has of a learner besides its weights, not copied."""
    moments = [learner.moments(adapter) for adapter in learner.revisions]
    return {name: tensor for part in (learner.state(), *moments) for name, tensor in part.items()}


def snapshot(learner: Learner) -> dict[str, Tensor]:
    """Copy everything that a step may change: adapter, optimizer, counts."""
    weights = {
        f"{adapter}: {name}": weight
        for adapter in learner.revisions
        for name, weight in learner.weights(adapter).items()
    }
    return {name: tensor.detach().clone() for name, tensor in {**weights, **state_of(learner)}.items()}


def restore(learner: Learner, state: dict[str, Tensor]) -> None:
    """Restore such copies in another learner."""
    for adapter in learner.revisions:
        weights = {name: state[f"{adapter}: {name}"] for name in learner.weights(adapter)}
        learner.load_adapter(adapter, weights, {name: state[name] for name in learner.moments(adapter)})
    learner.load_state({name: state[name] for name in learner.state()})


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two such copies are bit-equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def differences(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not bit-equal; both sides must have the same names."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]
