"""Reuse of the layers below the first adapted one: their output for a record is the same in every step of every run.

With `adapter.first_layer` the layers below it are frozen and have no adapter, so training, teacher-forced scoring and
the reading of a prompt need their output only once per record. It is kept in a folder that all runs on one backbone may
share: `KEY.npy` is the input of the first adapted layer, (T, D), and `KEY.cache.npy`, of prompts only, what the layers
below it add to a key-value cache, (layers, 2, G, T, E). KEY is a hash of the record's tokens. The tokens of an answer
go through all layers.
"""
# Shape suffixes: T tokens, D model width, G key-value heads, E head size.

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from streamlearn.backbone.attention import Records
from streamlearn.backbone.load import Backbone
from streamlearn.daemon.model import Model

HIDDEN = ".npy"
CACHE = ".cache.npy"


def reuse_lower_layers(model: Model, folder: Path | None) -> None:
    """Reuse what the layers below the adapters compute, kept in `folder`; None, or adapters in every layer: nothing."""
    first_layer = next(iter(model.peft.peft_config.values())).first_layer
    if folder is not None and first_layer:
        LowerLayers(model.backbone, first_layer, folder)


class LowerLayers:
    """The lower layers of a decoder, replaced in packed passes by what they computed before."""

    def __init__(self, backbone: Backbone, first_layer: int, folder: Path) -> None:
        """`first_layer` is the first one with an adapter, counted from 0; `folder` is made if it does not exist."""
        version = f"torch-{torch.__version__}-{backbone.device.type}"
        name = f"{backbone.identity['digest'][:16]}-layer-{first_layer}-{backbone.arithmetic.name}-{version}"
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._decoder = backbone.model.get_decoder()
        self._dtype = backbone.arithmetic.dtype
        self._skipped = False
        self._computing = False
        self._fill: _Fill | None = None
        self._decoder.register_forward_pre_hook(self._provide, with_kwargs=True)
        self._decoder.register_forward_hook(self._end, always_call=True)
        self._decoder.layers[first_layer].register_forward_pre_hook(self._stop, with_kwargs=True)
        for layer in self._decoder.layers[:first_layer]:
            layer.forward = _Skippable(self, layer.forward)

    @property
    def skipped(self) -> bool:
        """Whether the pass in progress starts above the lower layers."""
        return self._skipped

    def _provide(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        lengths, ids = kwargs.get("records"), kwargs.get("input_ids")
        if lengths is None or ids is None or self._computing:
            return None
        records = [ids[0, start:end] for start, end in pairwise(lengths.ends)]
        keys = [_key(record) for record in records]
        cached = bool(kwargs.get("use_cache"))
        self._complete(dict(zip(keys, records, strict=True)), cached=cached)
        hidden_TD = torch.cat([self._read(key) for key in keys]).to(ids.device)
        if cached:
            caches = torch.cat([self._read(key, CACHE) for key in keys], dim=3).to(ids.device)
            self._fill = _Fill(kwargs["past_key_values"], caches)
        self._skipped = True
        return args, {**kwargs, "input_ids": None, "inputs_embeds": hidden_TD[None]}

    def _end(self, *_: Any) -> None:
        self._skipped = False
        if self._fill is not None:
            self._fill.run()
            self._fill = None

    def _stop(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._computing:
            raise _ReachedError(args[0] if args else kwargs["hidden_states"])

    def _complete(self, records: Mapping[str, Tensor], *, cached: bool) -> None:
        """Write what the folder lacks; `cached` asks for the key-value caches too."""
        needed = CACHE if cached else HIDDEN
        missing = {key: record for key, record in records.items() if not self._file(key, needed).exists()}
        if not missing:
            return
        cache = DynamicCache() if cached else None
        lengths = [len(record) for record in missing.values()]
        hidden_TD = self._compute(list(missing.values()), cache)
        for key, hidden in zip(missing, torch.split(hidden_TD, lengths), strict=True):
            _write(self._file(key, HIDDEN), hidden)
        if cache is not None:
            caches = torch.stack([torch.cat([each.keys, each.values]) for each in cache.layers])
            for key, own in zip(missing, torch.split(caches, lengths, dim=3), strict=True):
                _write(self._file(key, CACHE), own)

    @torch.no_grad()
    def _compute(self, records: Sequence[Tensor], cache: DynamicCache | None) -> Tensor:
        """Run the lower layers on whole records: their output (T, D); what they add to `cache`, if there is one."""
        lengths = [len(record) for record in records]
        self._computing = True
        try:
            self._decoder(
                input_ids=torch.cat(list(records))[None],
                position_ids=torch.cat([torch.arange(n, device=records[0].device) for n in lengths])[None],
                records=Records(lengths),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        except _ReachedError as reached:
            return reached.hidden[0]
        finally:
            self._computing = False
        raise AssertionError("a pass goes through every layer")

    def _file(self, key: str, suffix: str) -> Path:
        return self._folder / f"{key}{suffix}"

    def _read(self, key: str, suffix: str = HIDDEN) -> Tensor:
        return _read(self._file(key, suffix), self._dtype)


@dataclass(frozen=True)
class _Fill:
    """What the skipped layers would have added to the cache of a pass."""

    cache: DynamicCache
    caches: Tensor
    """(layers, 2, G, T, E)."""

    def run(self) -> None:
        """Add it; after the pass, which takes the length of the cache's first layer for that of what came before."""
        for number, (keys_GTE, values_GTE) in enumerate(self.caches):
            self.cache.update(keys_GTE[None], values_GTE[None], number)


class _Skippable:
    """A layer's `forward` that hands its input on while the lower layers are skipped."""

    def __init__(self, owner: LowerLayers, forward: Any) -> None:
        self._owner = owner
        self._forward = forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._owner.skipped:
            return hidden_states
        return self._forward(hidden_states, *args, **kwargs)


class _ReachedError(Exception):
    """The pass has reached the first adapted layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        """Input of that layer, (1, T, D)."""


def _key(record: Tensor) -> str:
    return hashlib.blake2b(record.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _write(file: Path, hidden: Tensor) -> None:
    """Write the bits as integers, whole or not at all: another run may be reading the folder."""
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as target:
        np.save(target, hidden.contiguous().cpu().view(_integers(hidden.dtype)).numpy())
    os.replace(partial, file)


def _read(file: Path, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.load(file, allow_pickle=False)).view(dtype)


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32
