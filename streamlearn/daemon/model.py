"""Backbone, adapter and decoder: all that a snapshot needs to be used, with or without a stream."""

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.presets import HeadLoraConfig, objective, resolve, slot_of
from streamlearn.adapters.tuner import SHARED, attach
from streamlearn.backbone.load import Backbone, Outline, load
from streamlearn.baselines.consolidate import hooks_for
from streamlearn.daemon.process import return_freed_memory, return_freed_tensors
from streamlearn.daemon.run_state import RunState
from streamlearn.events import Event, get_logger
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regimes import Regimes, regimes_state
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import Snapshot, SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.stream.decode import Decoder

CPU, CUDA = "rng.torch", "rng.cuda"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's where the model is on one: uint8, by name."""
    on_gpu = {CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {CPU: torch.get_rng_state(), **on_gpu}


def restore_random_state(tensors: MutableMapping[str, Tensor], device: torch.device) -> None:
    """Take the states out of a snapshot's tensors and set them; that of a GPU applies to a GPU only."""
    torch.set_rng_state(tensors.pop(CPU))
    on_gpu = tensors.pop(CUDA, None)
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)


_log = get_logger("daemon")


class Model:
    """A loaded backbone with its adapter, the learner that owns both, and the decoder for its records."""

    def __init__(
        self,
        settings: Settings,
        shape: Outline,
        config: HeadLoraConfig,
        dtype: str | None,
        resting: Path,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Load the backbone.

        Args:
            settings: The configuration.
            shape: The backbone's.
            config: The adapter.
            dtype: That of the snapshot to resume, so that `backbone.dtype: auto` repeats the same bits.
            resting: Folder for the adapters of regimes beyond `adapter.max_in_memory`; emptied.
            mesh: See `load`.
        """
        torch.manual_seed(settings.seed)
        if settings.learner.activation_checkpointing:
            return_freed_tensors()
        self.backbone: Backbone = load(settings.backbone, shape, dtype=dtype, mesh=mesh)
        return_freed_memory()  # of weights in another dtype, and of what quantising took
        arithmetic = self.backbone.arithmetic
        _log.info(Event.DTYPE_CHOSEN, dtype=arithmetic.name, reason=arithmetic.reason)
        self.peft: PeftModel = attach(self.backbone.model, config, settings.seed)
        wanted = objective(settings)
        self.learner = Learner(
            self.peft,
            settings.learner,
            self.backbone.device,
            router_lr=wanted.router_lr,
            cache=AdapterCache(resting, settings.adapter.max_in_memory),
        )
        self.learner.hooks = hooks_for(self.learner, settings)
        types = settings.learner.sample_types if wanted.localized_balance else ()
        backbone = self.backbone
        self.decoder = Decoder(
            backbone.tokenizer, settings.stream, backbone.vocab_size, types, backbone.vision, backbone.template
        )
        self.adaptation = Regimes(self.learner, settings, backbone.vocab_size, self.decoder.restored)
        trainable = sum(p.numel() for p in self.learner.optimizer.parameters())
        _log.info(Event.ADAPTER_ATTACHED, preset=settings.adapter.preset, parameters=trainable)

    def parts(self) -> list[SnapshotPart]:
        """The parts of a snapshot: everything that the next step depends on besides the position."""
        learner = self.learner
        state = state_part({**learner.state(), **self.adaptation.tensors(), **random_state(learner.device)})
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
        load_adapters(self.learner, snapshot)
        restore_random_state(tensors, self.learner.device)
        self.learner.load_state(tensors)
        manifest = snapshot.manifest
        self.adaptation.restore(regimes_state(tensors, manifest.components["regimes"]))
        state = RunState.restored(manifest)
        _log.info(Event.SNAPSHOT_RESTORED, name=snapshot.name, records=state.records, position=str(manifest.position))
        return state


def save_adapter(learner: Learner, name: str, folder: Path) -> None:
    """Write the PEFT folder of one regime's adapter, which has its name."""
    # PEFT would list the weights of all adapters otherwise.
    weights = {f"{key}.{name}": tensor for key, tensor in learner.weights(name).items()}
    learner.model.save_pretrained(folder.parent, selected_adapters=[name], state_dict=weights)


def load_adapters(learner: Learner, snapshot: Snapshot) -> None:
    """Restore the weights of a snapshot's adapters, and the moments of those of one regime.

    Where regimes have adapters of their own, those of the snapshot and no others have one then.
    """
    if not learner.per_regime:
        learner.load_adapter(SHARED, snapshot.weights(), {})
        return
    names = snapshot.adapters()
    for name in names:
        learner.add_regime(slot_of(name), seed=0)  # every weight is replaced
        learner.load_adapter(name, snapshot.weights(name), snapshot.moments(name))
    learner.keep_regimes([slot_of(name) for name in names])


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


@cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that decide what a step computes."""
    return MappingProxyType(
        {name: version(name) for name in ("streamlearn", "torch", "transformers", "peft", "kafka-python")}
    )
