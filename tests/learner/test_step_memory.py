"""The estimate of a step's memory, against what autograd keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamlearn.adapters.context import routing_context
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import Outline, load, outline
from streamlearn.backbone.quantization import KINDS
from streamlearn.cli.doctor import StepMemory, can_estimate, step_memory
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.settings import AdapterSettings, Settings
from streamlearn.stream.record import Example


def largest_batch(settings: Settings, vocab_size: int) -> list[Example]:
    """Return records of `stream.max_tokens` that fill `stream.batch_tokens`."""
    generator = np.random.default_rng(0)
    length, total = settings.stream.max_tokens, settings.stream.batch_tokens
    lengths = [min(length, total - start) for start in range(0, total, length)]
    ids = [generator.integers(0, vocab_size, size=size, dtype=np.int32) for size in lengths]
    return [Example(input_ids=tokens, labels=tokens.copy()) for tokens in ids]


def settings_of(dtype: str = "float32", **sections: Any) -> Settings:
    given = {
        "source": {"jsonl": {"path": "unused"}},
        "backbone": {"dtype": dtype, "device": "cpu"},
        "stream": {"max_tokens": 256, "batch_tokens": 512},
        "learner": {"lr": 1e-3},
    }
    return Settings.model_validate({**given, **sections})


def estimate(settings: Settings, preset: Any = "mh-moe") -> StepMemory:
    shape = outline(settings.backbone)
    return step_memory(
        settings,
        shape,
        resolve(AdapterSettings(preset=preset)),
        dtype=getattr(torch, settings.backbone.dtype),
        on_cpu=True,
        adapters=1,
        process=0,
    )


def kept_bytes(settings: Settings, preset: Any) -> int:
    """What the graph of the largest batch holds, besides weights."""
    backbone = load(settings.backbone, outline(settings.backbone))
    model = attach(backbone.model, resolve(AdapterSettings(preset=preset)), 0)
    learner = Learner(model, settings.learner, backbone.device)
    packed = pack(largest_batch(settings, backbone.vocab_size), backbone.device)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def hook(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor),
        routing_context(learner.model, packed.context()),
    ):
        packed_loss(learner.forward, packed)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["lora", "mh-moe", "cp-moe"])
def test_activations_are_those_that_autograd_keeps(dtype: str, preset: str) -> None:
    """Eq. (2) to (6), up to what the first layer does without."""
    settings = settings_of(dtype)
    found = kept_bytes(settings, preset)
    assert 0.95 < estimate(settings, preset).activations / found < 1.15


def test_checkpointing_keeps_the_layers_inputs_only() -> None:
    """One layer's activations move to the backward pass."""
    plain, less = estimate(settings_of()), estimate(settings_of(learner={"activation_checkpointing": True}))
    shape = outline(settings_of().backbone).config
    assert less.activations == shape.num_hidden_layers * 512 * shape.hidden_size * 4
    assert less.backward > plain.backward
    assert less.total < plain.total


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_weights_are_those_that_are_stored(kind: str) -> None:
    """Up to the scales of int8 and buffers."""
    settings = settings_of(backbone={"dtype": "float32", "device": "cpu", "quantization": kind})
    model = load(settings.backbone, outline(settings.backbone)).model
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert estimate(settings).weights == pytest.approx(stored, rel=0.02)


def test_every_bundled_backbone_can_be_estimated(tmp_path: Path) -> None:
    """And a configuration that lacks something is told from it."""
    shape = outline(settings_of().backbone)
    assert can_estimate(shape)
    assert can_estimate(outline(settings_of(backbone={"model": "builtin:nano-vl"}).backbone))

    class Sparse:
        def get_text_config(self) -> object:
            return object()

    assert not can_estimate(Outline(tmp_path, Sparse(), {}, {}, 0, ()))
