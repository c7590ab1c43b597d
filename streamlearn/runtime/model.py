"""Backbone, adapter and decoder: all that a snapshot needs to be used, with or without a stream."""

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file

from streamlearn.adaptation.adaptation import Adaptation
from streamlearn.adapters.config import HeadLoraConfig, regime_adapter, slot_of
from streamlearn.adapters.model import SHARED, attach
from streamlearn.adapters.presets import objective, resolve
from streamlearn.backbone.load import Backbone, Outline, load
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner
from streamlearn.runtime.run_state import RunState
from streamlearn.settings import Settings
from streamlearn.snapshot.part import SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.stream.decode import Decoder

_log = get_logger("daemon")


class Model:
    """A loaded backbone with its adapter, the learner that owns both, and the decoder for its records."""

    def __init__(self, settings: Settings, shape: Outline, config: HeadLoraConfig, dtype: str | None) -> None:
        """`dtype` is that of the snapshot to resume, so that `backbone.dtype: auto` repeats the same bits."""
        torch.manual_seed(settings.seed)
        self.backbone: Backbone = load(settings.backbone, shape, dtype=dtype)
        arithmetic = self.backbone.arithmetic
        _log.info(Event.DTYPE_CHOSEN, dtype=arithmetic.name, reason=arithmetic.reason)
        self.peft: PeftModel = attach(self.backbone.model, config, settings.seed)
        wanted = objective(settings)
        self.learner = Learner(
            self.peft,
            settings.learner,
            self.backbone.device,
            objective=wanted,
            integrate=wanted.anchor_strength > 0 and settings.consolidate.importance == "path",
        )
        types = settings.learner.sample_types if wanted.localized_balance else ()
        backbone = self.backbone
        self.decoder = Decoder(
            backbone.tokenizer, settings.stream, backbone.vocab_size, types, backbone.vision, backbone.template
        )
        self.adaptation = Adaptation(self.learner, settings, backbone.vocab_size, self.decoder.restored)
        trainable = sum(p.numel() for p in self.learner.optimizer.parameters())
        _log.info(Event.ADAPTER_ATTACHED, preset=settings.adapter.preset, parameters=trainable)

    def parts(self) -> list[SnapshotPart]:
        """The parts of a snapshot: everything that the next step depends on besides the position."""
        learner = self.learner
        state = state_part({**learner.state(), **self.adaptation.state(), "rng.torch": torch.get_rng_state()})
        if not learner.per_regime:
            return [state, adapter_part(self.peft.save_pretrained)]
        adapters = [
            adapter_part(partial(save_adapter, learner, name), name=name, revision=revision)
            for name, revision in learner.revisions.items()
        ]
        optimizer = [
            optimizer_part(name, partial(learner.moments, name), revision=revision)
            for name, revision in learner.revisions.items()
        ]
        return [state, *adapters, *optimizer]

    def restore(self, snapshot: Snapshot) -> RunState:
        """Load a snapshot's weights, optimizer and detectors in place; return the rest of its state."""
        tensors = snapshot.tensors()
        load_adapters(self.learner, snapshot.adapter)
        torch.set_rng_state(tensors.pop("rng.torch"))
        self.learner.load_state(tensors)
        manifest = snapshot.manifest
        self.adaptation.restore(tensors, manifest.components["regimes"])
        state = RunState.restored(manifest)
        _log.info(Event.SNAPSHOT_RESTORED, name=snapshot.name, records=state.records, position=str(manifest.position))
        return state


def save_adapter(learner: Learner, name: str, folder: Path) -> None:
    """Write the PEFT folder of one regime's adapter, which has its name."""
    own = [bank for bank in learner.banks if bank.adapter == name]
    weights = {
        f"base_model.model.{bank.linear}.head_lora_{part}.{name}": tensor
        for bank in own
        for part, tensor in (("A", bank.A), ("B", bank.B), ("router", bank.router))
        if tensor is not None
    }  # PEFT would list the weights of all adapters otherwise
    learner.model.save_pretrained(folder.parent, selected_adapters=[name], state_dict=weights)


def load_adapters(learner: Learner, folder: Path) -> None:
    """Copy the weights of the PEFT folder of a snapshot into the live adapter.

    Where regimes have adapters of their own, the folder has one PEFT folder for each; those regimes and no others have
    an adapter then.
    """
    if not learner.per_regime:
        _load_adapter(learner.model, folder, SHARED)
        return
    slots = sorted(slot_of(path.name) for path in folder.iterdir() if path.is_dir())
    for slot in slots:
        learner.add_regime(slot, seed=0)  # every weight is replaced
    learner.keep_regimes(slots)
    for slot in slots:
        _load_adapter(learner.model, folder / regime_adapter(slot), regime_adapter(slot))


def _load_adapter(model: PeftModel, folder: Path, name: str) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    outcome = set_peft_model_state_dict(model, weights, adapter_name=name)
    assert not outcome.unexpected_keys, "the manifest was checked against this adapter before"


def adapter_of(settings: Settings) -> HeadLoraConfig:
    """The adapter that the configuration describes, with one CP bias per regime slot where routing is biased."""
    biased = objective(settings).bias != "none"
    return resolve(settings.adapter, regimes=settings.shift.max_regimes if biased else 0)


def adapter_shape(config: HeadLoraConfig) -> dict[str, Any]:
    """The options of an adapter that decide what its weights mean, for the manifest."""
    names = ("r", "alpha", "num_heads", "num_experts", "top_k", "gate", "router_gradient", "routes", "target_modules")
    optional = {
        name: asdict(config)[name] for name in ("per_regime", "vision_modules", "first_layer") if asdict(config)[name]
    }
    return {**{name: asdict(config)[name] for name in names}, **optional}


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a step computes."""
    return {name: version(name) for name in ("streamlearn", "torch", "transformers", "peft", "kafka-python")}
