"""The tuner in PEFT's own hands: `get_peft_model`, `save_pretrained`, `generate`, without the daemon."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.errors import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
IDS = torch.arange(1, 11).reshape(2, 5)
TOKENS: dict[str, Any] = {"num_heads": 4, "num_experts": 2}
SEQUENCES: dict[str, Any] = {"num_heads": 1, "num_experts": 2, "routes": "sequences"}


def backbone(kind: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model("llama", **SHAPE, num_labels=3))


def randomized(model: PeftModel, seed: int = 1) -> PeftModel:
    """With experts that do something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "head_lora" in name:
            nn.init.normal_(parameter, generator=generator)
    return model.eval()


def adapted(target: Any = ("up_proj", "down_proj"), **options: Any) -> PeftModel:
    target = list(target) if isinstance(target, tuple) else target
    return randomized(get_peft_model(backbone(), HeadLoraConfig(target_modules=target, **{**TOKENS, **options})))


def linears(model: PeftModel) -> set[str]:
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, HeadLoraLinear)
    }


def logits(model: PeftModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize(
    "target", ["all-linear", r".*\.1\.mlp\.up_proj", r"model\.layers\.0\..*_proj"], ids=["all", "one", "layer"]
)
def test_a_string_selects_what_it_selects_for_lora(target: str) -> None:
    """A regular expression of whole names, or all linears."""
    expected = get_peft_model(backbone(), LoraConfig(target_modules=target))
    names = {name for name, _ in expected.named_modules() if name.endswith(".base_layer")}
    assert linears(adapted(target)) == {
        name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in names
    }


def test_layers_and_ranks_by_pattern() -> None:
    """As in LoraConfig; the scaling is alpha over the layer's own rank."""
    model = adapted(layers_to_transform=[1], rank_pattern={"down_proj": 2}, r=4, alpha=8.0)
    assert linears(model) == {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"}
    mlp = model.base_model.model.model.layers[1].mlp
    assert [linear.head_lora_A["default"].shape[2] for linear in (mlp.up_proj, mlp.down_proj)] == [4, 2]
    assert [linear.head_lora_config["default"].scaling for linear in (mlp.up_proj, mlp.down_proj)] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("kind", "task"),
    [(AutoModelForSequenceClassification, "SEQ_CLS"), (AutoModelForTokenClassification, "TOKEN_CLS")],
)
def test_the_head_of_a_classifier_is_trained_and_saved(kind: Any, task: str, tmp_path: Path) -> None:
    config = HeadLoraConfig(task_type=task, target_modules=["up_proj"], **TOKENS)
    model = randomized(get_peft_model(backbone(kind), config))
    heads = [parameter for name, parameter in model.named_parameters() if "score" in name and parameter.requires_grad]
    assert heads
    for head in heads:
        nn.init.constant_(head, 0.25)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(backbone(kind), tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(model))


def test_hooks_see_the_frozen_output() -> None:
    model = adapted()
    linear = model.base_model.model.model.layers[0].mlp.up_proj
    expected = logits(model)
    seen: list[tuple[Tensor, Tensor]] = []
    linear.base_layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    assert torch.equal(logits(model), expected)
    ((x, y),) = seen
    assert torch.equal(y, nn.functional.linear(x, linear.base_layer.weight))


def test_a_backward_hook_of_the_frozen_linear_is_called() -> None:
    model = adapted()
    called: list[bool] = []
    linear = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    linear.register_full_backward_hook(lambda *_: called.append(True))
    model(input_ids=IDS).logits.sum().backward()
    assert called == [True]


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
def test_nothing_of_a_pass_outlives_it(options: dict[str, Any]) -> None:
    """A trained model can be copied, and the copy computes the same."""
    model = adapted(**options)
    model(input_ids=IDS).logits.sum().backward()
    assert model.base_model.context_holder.context.block_decisions == {}
    torch.testing.assert_close(logits(copy.deepcopy(model)), logits(model))


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


def test_a_backbone_that_was_unloaded_keeps_nothing_of_the_adapter() -> None:
    """No layer and no hook."""
    model = backbone()
    hooks = dict(model._forward_hooks), dict(model._forward_pre_hooks)
    unloaded = get_peft_model(model, HeadLoraConfig(target_modules=["up_proj"], **TOKENS)).unload()
    assert (dict(unloaded._forward_hooks), dict(unloaded._forward_pre_hooks)) == hooks == ({}, {})
    assert linears(unloaded) == set()
    unloaded(input_ids=IDS)


@pytest.mark.parametrize("options", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_an_input_without_tokens(options: dict[str, Any]) -> None:
    linear = adapted(**options).base_model.model.model.layers[0].mlp.up_proj
    assert linear(torch.zeros(0, 32)).shape == (0, 64)
    assert linear(torch.zeros(0, 5, 32)).shape == (0, 5, 64)


def test_two_active_adapters_that_route_sequences_keep_their_own_choices() -> None:
    """Their outputs add up, as those of two LoRAs do."""
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(32, 16)), HeadLoraConfig(target_modules=["0"], **SEQUENCES))
    model.add_adapter("other", HeadLoraConfig(target_modules=["0"], init_seed=1, **SEQUENCES))
    randomized(model)
    x = torch.randn(6, 3, 32)

    def output(adapters: list[str]) -> Tensor:
        model.base_model.set_adapter(adapters)
        with torch.no_grad():
            found: Tensor = model(x)
        return found

    with model.disable_adapter(), torch.no_grad():
        frozen = model(x)
    torch.testing.assert_close(
        output(["default", "other"]) - frozen, output(["default"]) + output(["other"]) - 2 * frozen
    )


def test_a_second_adapter_shares_the_context_of_the_first() -> None:
    """Also in layers that only one of them adapts."""
    model = adapted(("up_proj", "down_proj"))
    model.add_adapter("other", HeadLoraConfig(target_modules=["up_proj"], **TOKENS))
    holders = {id(module.context_holder) for module in model.modules() if isinstance(module, HeadLoraLinear)}
    assert holders == {id(model.base_model.context_holder)}


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
    assert decided == [2, 2], "the next prompt is routed anew"


@pytest.mark.parametrize("options", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_weights_are_read_onto_the_meta_device_and_from_there(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(backbone(), tmp_path, low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(again), logits(model))


def test_heads_that_do_not_divide_a_target_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_heads: must divide .* 5 does not divide 32, .*up_proj"):
        adapted(num_heads=5)
    model = adapted()
    with pytest.raises(ConfigError, match=r"num_heads: must divide .* 3 does not divide 32"):
        model.add_adapter("other", HeadLoraConfig(target_modules=["up_proj"], num_heads=3))


@pytest.mark.parametrize("target", [None, 3, [1]])
def test_targets_that_are_no_names_are_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"target_modules: must be names of linears, a regular expression .*found"):
        HeadLoraConfig(target_modules=target)


def test_experts_in_the_backbones_dtype_are_refused() -> None:
    config = HeadLoraConfig(target_modules=["up_proj"], **TOKENS)
    with pytest.raises(ConfigError, match=r"autocast_adapter_dtype: must be true"):
        get_peft_model(backbone().bfloat16(), config, autocast_adapter_dtype=False)


def test_an_adapter_for_each_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter_names: one adapter for all sequences"):
        adapted()(input_ids=IDS, adapter_names=["default", "default"])


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # by dynamo itself
@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("grad", [True, False])
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
