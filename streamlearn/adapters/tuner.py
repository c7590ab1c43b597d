"""The PEFT tuner: adds experts to a backbone's linears, and lists them."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from peft import PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method
from torch import Tensor, nn

from streamlearn.adapters.context import AdaptedLayer, RoutingContext, RoutingContextHolder
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import (
    METHOD,
    HeadLoraConfig,
    check,
    check_heads,
    decoder_targets,
    linear_shapes,
    regime_adapter,
    targets,
)
from streamlearn.errors import ConfigError

SHARED = "default"
"""PEFT's name for the adapter that all regimes share."""


class HeadLoraModel(BaseTuner):  # type: ignore[misc]  # peft is not type-checked here
    """PEFT's tuner: replaces the target linears by `HeadLoraLinear`."""

    prefix = "head_lora_"
    tuner_layer_cls = HeadLoraLinear
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  # PEFT reads it as a class attribute

    def _prepare_model(self, peft_config: HeadLoraConfig, model: nn.Module) -> None:
        self.decoder_prefix = _decoder_prefix(model)
        self.generator = torch.Generator().manual_seed(peft_config.init_seed)
        self.blocks_with_router: set[str] = set()
        if not hasattr(self, "context_holder"):  # all adapters of a model have one
            self.context_holder = RoutingContextHolder()

    @contextmanager
    def _enable_peft_forward_hooks(self, *_: Any, **__: Any) -> Iterator[None]:
        """PEFT calls this around every forward pass and generation of its own; each gets a context of its own.

        Where sequences are routed, a generation keeps the experts of its prompts.
        """
        holder = self.context_holder
        with holder.using(RoutingContext(decoding=True)) if holder.context is holder.outside else nullcontext():
            yield

    def _create_and_replace(  # PEFT's signature
        self,
        peft_config: HeadLoraConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **_: Any,
    ) -> None:
        layer = target
        if not isinstance(layer, HeadLoraLinear):
            if not isinstance(target, nn.Linear):
                raise ConfigError(f"target_modules: {current_key} must be an nn.Linear, found {type(target).__name__}")
            layer = HeadLoraLinear(target)
        check_heads(peft_config.num_heads, {current_key: (layer.in_features, layer.out_features)})
        if layer is not target:
            setattr(parent, target_name, layer)
        block = _block_of(current_key) if peft_config.routes == "sequences" else current_key
        layer.update_layer(
            adapter_name,
            peft_config,
            self.generator,
            self.context_holder,
            name=current_key,
            block=block,
            is_vision=not current_key.startswith(self.decoder_prefix),
            owns_router=block not in self.blocks_with_router,
        )
        self.blocks_with_router.add(block)

    def add(self, name: str, config: HeadLoraConfig) -> None:
        """Add an adapter, trainable, to the linears that have one; an adapter of this name is replaced."""
        self.peft_config[name] = config
        self._prepare_model(config, self.model)
        for key, layer in list(self.model.named_modules()):
            if isinstance(layer, HeadLoraLinear):
                self._create_and_replace(config, name, layer, "", layer, key)

    def _check_merge_allowed(self) -> NoReturn:
        """PEFT calls this before every merge."""
        raise NotImplementedError(
            "experts that are selected per token are not one weight matrix and cannot be merged; keep the adapter "
            "separate: save_pretrained, then PeftModel.from_pretrained"
        )


@dataclass(frozen=True)
class Bank:
    """The experts of one linear in one adapter."""

    linear: str
    """The linear's name in the backbone, for example model.layers.0.mlp.up_proj."""
    adapter: str
    """PEFT's name for the adapter."""
    layer: HeadLoraLinear
    A: nn.Parameter
    """(H, K, R, S)."""
    B: nn.Parameter
    """(H, K, R, O)."""
    router: nn.Parameter | None
    """(H, K, S); None without a router, and in a layer that shares the router of another layer in its block."""

    @property
    def name(self) -> str:
        """The linear's name, prefixed by the adapter's where each regime has its own."""
        return self.linear if self.adapter == SHARED else f"{self.adapter}/{self.linear}"

    @property
    def info(self) -> AdaptedLayer:
        """Description passed to hooks and parallel adapters."""
        return self.layer.head_lora_info[self.adapter]

    @property
    def load_HK(self) -> Tensor | None:  # noqa: N802  # a shape suffix
        """Tokens, or sequences, routed to each expert in training passes since `reset_load`; None without a router."""
        loads = self.layer.head_lora_load
        return loads[self.adapter] if self.adapter in loads else None  # noqa: SIM401  a BufferDict has no get

    def reset_load(self) -> None:
        """Set every expert's load to zero."""
        if self.load_HK is not None:
            self.load_HK.zero_()

    @property
    def bias_HKN(self) -> Tensor | None:  # noqa: N802
        """CP bias of every regime slot, added to the logits; None where routing does not depend on the regime."""
        config = self.layer.head_lora_config[self.adapter]
        return self.layer.head_lora_bias[self.adapter] if config.routed and config.regimes else None


def attach(model: nn.Module, config: HeadLoraConfig, seed: int) -> PeftModel:
    """Add experts to the target linears of `model` and freeze everything else; the output does not change yet.

    Where each regime has its own adapter, the adapter of slot 0 is added.

    Args:
        model: The backbone; its linears are replaced in place.
        config: The adapter; not changed.
        seed: Seed of A and of the routers.

    Raises:
        ConfigError: the adapter does not fit, see `check`; the backbone is not changed.
    """
    decoder_prefix = _decoder_prefix(model)
    shapes = linear_shapes(model)
    decoder = {name: shape for name, shape in shapes.items() if name.startswith(decoder_prefix)}
    vision = {name: shape for name, shape in shapes.items() if name not in decoder}
    check(config, decoder, vision)
    adapted = decoder_targets(config, decoder) | targets(config.vision_modules, vision)
    names = [*config.target_modules, *config.vision_modules]
    others = {name: (0, 0) for name, _ in model.named_modules() if name not in adapted}
    excluded = [re.escape(name) for name in targets(names, others)] if vision or config.first_layer else []
    config = replace(config, init_seed=seed, target_modules=names, exclude_modules="|".join(excluded) or None)
    with warnings.catch_warnings():  # peft 0.21 calls transformers 5.2x by a deprecated name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        attached = get_peft_model(model, config, adapter_name=regime_adapter(0) if config.per_regime else SHARED)
    # `save_pretrained` would render a page for the hub into every snapshot: of a small model, a third of its time.
    attached.create_or_update_model_card = lambda _: None
    return attached


def add_regime(model: PeftModel, slot: int, seed: int) -> None:
    """Give the regime in `slot` its own adapter, without effect on the output yet; one in that slot is replaced.

    It has the options of the adapter that `attach` added.

    Args:
        model: What `attach` returned.
        slot: The regime's slot, see `regime_adapter`.
        seed: Seed of A and of the routers.
    """
    config = next(iter(model.peft_config.values()))
    model.base_model.add(regime_adapter(slot), replace(config, init_seed=seed))


def delete_adapter(model: PeftModel, name: str) -> None:
    """Delete an adapter, which must not be the only one."""
    others = [other for other in model.peft_config if other != name]
    if name in model.active_adapters:  # PEFT would warn
        model.set_adapter(others[0])  # which freezes all others
        model.set_requires_grad(others)
    model.delete_adapter(name)


def _decoder_prefix(model: nn.Module) -> str:
    """Prefix of the decoder's module names in an image-text model; empty in a text-only one."""
    if getattr(getattr(model, "config", None), "vision_config", None) is None:
        return ""
    decoder = model.get_decoder()  # type: ignore[operator]  # transformers' own
    return next(f"{name}." for name, module in model.named_modules() if module is decoder)


def banks(model: nn.Module, adapter: str = SHARED) -> list[Bank]:
    """List the banks of an adapter, named as PEFT does, in the order of the backbone's modules."""
    return [
        Bank(
            name.removeprefix("base_model.model."),
            adapter,
            layer,
            layer.head_lora_A[adapter],
            layer.head_lora_B[adapter],
            layer.head_lora_router.get(adapter),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, HeadLoraLinear) and adapter in layer.head_lora_A
    ]


def _block_of(key: str) -> str:
    """Name of the module's transformer block: up to the first number, for example model.layers.3."""
    parts = key.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: numbered + 1])


if PeftType[METHOD] not in PEFT_TYPE_TO_TUNER_MAPPING:  # importing twice must not register twice
    register_peft_method(name=METHOD.lower(), config_cls=HeadLoraConfig, model_cls=HeadLoraModel)


@torch.no_grad()
def copy_slots(target: Tensor, saved: Tensor) -> None:
    """Copy values saved with fewer or equally many slots, in the last dimension; new slots get zero."""
    target.zero_()
    target[..., : saved.shape[-1]].copy_(saved)
