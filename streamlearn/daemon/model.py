"""The model of a run: backbone, adapter, learner and decoder, with or without a stream."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.presets import METHOD, HeadLoraConfig, objective, resolve, slot_of
from streamlearn.adapters.tuner import SHARED, attach
from streamlearn.backbone.load import Backbone, Outline, Preprocessing, load
from streamlearn.daemon.process import return_freed_memory, return_freed_tensors
from streamlearn.events import Event, get_logger
from streamlearn.export.formats import BaseModel, regime_lora, write_peft
from streamlearn.export.lora import expert_weights, plain_lora
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.learner import Compute, Learner
from streamlearn.learner.memory import random_state, restore_random_state
from streamlearn.regimes.canaries import read_canaries
from streamlearn.regimes.regime import RegimesState
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings
from streamlearn.snapshot.parts import Snapshot, SnapshotPart, adapter_part, optimizer_part, state_part
from streamlearn.stream.decode import Decoder

_log = get_logger("daemon")


class Model:
    """A loaded backbone with its adapter, the learner that owns both, and the decoder for its records."""

    def __init__(
        self,
        settings: Settings,
        shape: Outline,
        config: HeadLoraConfig,
        dtype: str | None,
        offloaded: Path,
        *,
        mesh: DeviceMesh | None = None,
        compute: Compute | None = None,
        backbone: Backbone | None = None,
    ) -> None:
        """Load the backbone, unless it is given.

        Args:
            settings: The configuration.
            shape: The backbone's.
            config: The adapter.
            dtype: That of the snapshot to resume, so that `backbone.dtype: auto` repeats the same bits.
            offloaded: Folder for the adapters of regimes beyond `adapter.max_in_memory`; emptied.
            mesh: See `load`.
            compute: See `Learner`.
            backbone: One that is loaded already.
        """
        torch.manual_seed(settings.seed)
        self.base = BaseModel.from_settings(settings.backbone, shape)
        if settings.learner.activation_checkpointing:
            return_freed_tensors()
        self.backbone = load(settings.backbone, shape, dtype=dtype, mesh=mesh) if backbone is None else backbone
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
            cache=AdapterCache(offloaded, settings.adapter.max_in_memory),
            compute=compute,
        )
        if not wanted.is_plain:
            from streamlearn.baselines.consolidate import BaselineHooks  # noqa: PLC0415  the default preset has none

            self.learner.hooks = BaselineHooks(self.learner, wanted, settings)
        self.decoder = decoder_of(settings, self.backbone)
        vectors = self.backbone.token_vectors
        canaries = read_canaries(settings.holdout.canaries, self.decoder, settings.stream)
        decoder = self.decoder
        self.adaptation = Regimes(self.learner, settings, decoder.with_images, decoder.text, vectors, canaries=canaries)
        trainable = sum(p.numel() for p in self.learner.optimizer.parameters())
        _log.info(Event.ADAPTER_ATTACHED, preset=settings.adapter.preset, parameters=trainable)

    def parts(self, components: Mapping[str, Tensor]) -> list[SnapshotPart]:
        """The parts of a snapshot: everything that the next step depends on, with the tensors of `components`."""
        learner = self.learner
        state = state_part({**learner.state(), **random_state(learner.device), **components})
        if not learner.per_regime:
            return [state, adapter_part(partial(save_adapter, learner, SHARED, self.base))]
        adapters = [
            adapter_part(partial(save_adapter, learner, name, self.base), name=name, revision=revision)
            for name, revision in learner.revisions.items()
        ]
        optimizer = [
            optimizer_part(name, partial(learner.moments, name), revision=revision)
            for name, revision in learner.revisions.items()
        ]
        return [state, *adapters, *optimizer]

    def restore(self, snapshot: Snapshot) -> None:
        """Load a snapshot's weights, optimizer, random state and regimes in place."""
        tensors = snapshot.tensors()
        load_adapters(self.learner, snapshot, self.base)
        restore_random_state(tensors, self.learner.device)
        self.learner.load_state(tensors)
        self.adaptation.restore(snapshot.component("regimes", RegimesState))


def decoder_of(settings: Settings, backbone: Backbone | Preprocessing) -> Decoder:
    """Build the decoder of a configuration; `load_preprocessing` suffices for it.

    Raises:
        ConfigError: conversations cannot be learned with the backbone's chat template.
    """
    types = settings.learner.sample_types if objective(settings).localized_balance else ()
    decoder = Decoder(
        backbone.tokenizer,
        settings.stream,
        backbone.vocab_size,
        types,
        backbone.vision,
        backbone.template,
        settings.records,
    )
    decoder.check_template()
    return decoder


def save_adapter(learner: Learner, name: str, base: BaseModel, folder: Path) -> None:
    """Write the PEFT folder of an adapter: with one expert a head a LoRA, which needs no streamlearn to be loaded."""
    config = learner.model.peft_config[name]
    if config.num_experts == 1:
        folder.mkdir()
        write_peft(folder, plain_lora(learner.weights(name), config), base)
        return
    # PEFT would list the weights of all adapters otherwise, and makes a folder of any name but `SHARED` itself.
    weights = {f"{key}.{name}": tensor for key, tensor in learner.weights(name).items()}
    parent = folder if name == SHARED else folder.parent
    learner.model.save_pretrained(parent, selected_adapters=[name], state_dict=weights)
    (folder / "README.md").write_text(_ROUTED, encoding="utf-8")


_ROUTED = f"""Tokens choose among experts here ({METHOD}): PEFT loads this folder after `import streamlearn.adapters`.
For programs without streamlearn, use `streamlearn export --approximate`.
"""


def load_adapters(learner: Learner, snapshot: Snapshot, base: BaseModel) -> None:
    """Restore the weights of a snapshot's adapters, and the moments of those of one regime.

    Where regimes have adapters of their own, those of the snapshot and no others have one then.
    """

    def weights(name: str) -> Mapping[str, Tensor]:
        config = next(iter(learner.model.peft_config.values()))
        if config.num_experts > 1:
            return snapshot.weights(name)
        return expert_weights(regime_lora(snapshot, name, config, base), config)

    if not learner.per_regime:
        learner.load_adapter(SHARED, weights(""), {})
        return
    names = snapshot.adapters()
    for name in names:
        learner.add_regime(slot_of(name), seed=0)  # every weight is replaced
        learner.load_adapter(name, weights(name), snapshot.moments(name))
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
