"""The PEFT tuner on models: `attach`, `banks`, `save_pretrained`, `PeftModel.from_pretrained`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from streamlearn.adapters.presets import PRESETS, HeadLoraConfig, resolve
from streamlearn.adapters.tuner import attach, banks
from streamlearn.settings import AdapterSettings
from tests.variants import variants

ARCHITECTURES = ("qwen3", "llama", "mistral", "gemma")

IDS = torch.arange(24).view(2, 12) * 5 % 61


def backbone(architecture: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.for_model(
        architecture,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(dtype)


def train(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize(
    ("architecture", "preset"),
    [*((architecture, "mh-moe") for architecture in ARCHITECTURES[1:]), *(("qwen3", preset) for preset in PRESETS)],
)
def test_trains_the_experts_and_nothing_else(architecture: str, preset: Any) -> None:
    """The output is the backbone's at first, the loss falls, the backbone keeps every bit."""
    model = backbone(architecture)
    before, expected = {n: p.clone() for n, p in model.named_parameters()}, logits(model)
    adapted = attach(model, resolve(AdapterSettings(preset=preset)), seed=1)
    assert torch.equal(logits(adapted), expected)
    losses = train(adapted, 6)
    assert losses[-1] < losses[0]
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if "head_lora" not in n}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("preset", ["streamlearn", "mh-moe", "mot"])
def test_the_backward_pass_ends_at_the_first_layer(preset: Any, tmp_path: Path) -> None:
    """Layers below get no experts and what they compute needs no gradient; a saved adapter is loaded the same."""
    model = backbone()
    adapted = attach(model, resolve(AdapterSettings(preset=preset, first_layer=1)), seed=1)
    assert {bank.linear.split(".")[2] for bank in banks(adapted, adapted.active_adapter)} == {"1"}
    needed: dict[int, bool] = {}
    layers = [(0, model.model.layers[0]), (1, model.model.layers[1])]
    for number, layer in layers:
        layer.register_forward_hook(
            lambda _module, _inputs, output, number=number: needed.update({number: output.requires_grad})
        )
    losses = train(adapted, 3)
    assert losses[-1] < losses[0]
    assert needed == {0: False, 1: True}
    adapted.save_pretrained(tmp_path)
    folder = tmp_path / "regime0" if resolve(AdapterSettings(preset=preset)).per_regime else tmp_path
    loaded = PeftModel.from_pretrained(backbone(), folder)
    torch.testing.assert_close(logits(loaded), logits(adapted))


LOAD = """
import sys, warnings, torch
import streamlearn.adapters
from peft import PeftModel
from tests.adapters.test_tuner import backbone, logits
model = PeftModel.from_pretrained(backbone(dtype=getattr(torch, sys.argv[2])), sys.argv[1])
state = {n: p for n, p in model.named_parameters() if "head_lora" in n}
torch.save({"logits": logits(model), "state": state}, sys.argv[3])
"""


@pytest.mark.parametrize("dtype", variants(["float32", "bfloat16"], short=["bfloat16"]))
def test_loads_bit_for_bit_in_a_fresh_process(tmp_path: Path, dtype: str) -> None:
    """PeftModel.from_pretrained restores weights and output, also with a bf16 backbone."""
    adapted = attach(backbone(dtype=getattr(torch, dtype)), HeadLoraConfig(), seed=1)
    train(adapted, 2)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    result = tmp_path / "result"
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "adapter", dtype, result], check=True, timeout=300)
    loaded = torch.load(result, weights_only=True)
    assert torch.equal(loaded["logits"], logits(adapted))
    state = {name: p for name, p in adapted.named_parameters() if "head_lora" in name}
    assert loaded["state"].keys() == state.keys()
    assert all(torch.equal(loaded["state"][name], p) for name, p in state.items())


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused(merge: str) -> None:
    """Experts selected per token are not one matrix; the message says what to do instead."""
    adapted = attach(backbone(), HeadLoraConfig(), seed=1)
    with pytest.raises(NotImplementedError, match="cannot be merged; keep the adapter separate"):
        getattr(adapted, merge)()


TOKENS: dict[str, Any] = {"num_heads": 4, "num_experts": 2}

SEQUENCES: dict[str, Any] = {"num_heads": 1, "num_experts": 2, "routes": "sequences"}


def randomized(model: PeftModel, seed: int = 1) -> PeftModel:
    """With experts that do something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "head_lora" in name:
            nn.init.normal_(parameter, generator=generator)
    return model.eval()


def adapted(target: Any = ("up_proj", "down_proj"), **options: Any) -> PeftModel:
    target = list(target) if isinstance(target, tuple) else target
    return randomized(get_peft_model(backbone("llama"), HeadLoraConfig(target_modules=target, **{**TOKENS, **options})))


def test_a_linear_that_keeps_its_output_for_the_backward_pass() -> None:
    """As quantized ones may; its gradient would be refused if the output were changed."""

    class Squashed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()  # its gradient is computed from its output

    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

    for kind in (Squashed, Transposed):
        torch.manual_seed(0)
        model = get_peft_model(nn.Sequential(kind(32, 16)), HeadLoraConfig(target_modules=["0"], **TOKENS))
        x = torch.randn(2, 3, 32, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("options", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_a_layer_whose_only_adapter_was_deleted_is_the_backbones(options: dict[str, Any]) -> None:
    """The other adapter is in other layers, and begins without effect."""
    model = adapted(("up_proj",), **options)
    with model.disable_adapter():
        expected = logits(model)
    assert not torch.equal(logits(model), expected)
    model.add_adapter("other", HeadLoraConfig(target_modules=["down_proj"], **options))
    model.set_adapter("other")
    model.delete_adapter("default")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_generation_keeps_the_experts_of_the_prompt() -> None:
    """Where sequences are routed: with cached keys and values as without, token by token."""
    model = adapted(**SEQUENCES)
    router = model.base_model.model.model.layers[0].mlp.up_proj
    decided: list[int] = []
    really = router._decide

    def decide(*arguments: Any) -> Any:
        decided.append(arguments[2])
        return really(*arguments)

    router._decide = decide
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.generate(input_ids=IDS, **options)
    assert decided == [2], "one decision a sequence"
    model.generate(input_ids=IDS, **options)
    assert decided == [2, 2], "the next prompt is routed again"


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # by dynamo itself
@pytest.mark.parametrize(("experts", "grad"), [(1, True), (2, False)])
def test_a_compiled_model_is_one_graph(experts: int, grad: bool) -> None:
    """Whether or not a gradient is wanted."""
    torch.manual_seed(0)
    config = HeadLoraConfig(target_modules=["0"], num_heads=4, num_experts=experts)
    model = randomized(get_peft_model(nn.Sequential(nn.Linear(32, 16)), config))
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(3, 5, 32)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        torch.compiler.reset()
        compiled: Any = torch.compile(model, backend=count, fullgraph=True)
        found = compiled(x)
    assert len(graphs) == 1
    torch.testing.assert_close(found, expected)
