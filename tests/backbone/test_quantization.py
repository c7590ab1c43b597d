"""Quantised backbones: what is stored, what is computed from it, and what is refused."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from streamlearn.adapters.presets import linear_shapes
from streamlearn.backbone.checks import plain_head
from streamlearn.backbone.load import load, outline
from streamlearn.backbone.quantization import BLOCK, KINDS, Int8Linear, Nf4Linear, QuantizedLinear
from streamlearn.errors import ConfigError
from streamlearn.settings import BackboneSettings, Quantization
from tests.backbone.conftest import Folders

NF4_CODE = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""QLoRA (arXiv 2305.14314), appendix E."""


@pytest.fixture
def linear() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(BLOCK, 24).requires_grad_(requires_grad=False)


def nearest(values: Tensor, code: Tensor) -> Tensor:
    return code[(values[..., None] - code).abs().argmin(-1)]


def test_int8_rounds_each_row_to_its_largest_weight(linear: nn.Linear) -> None:
    """Eq. (1), row by row."""
    weight_OD = linear.weight.to(torch.float16).float()
    scale_O1 = weight_OD.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(Int8Linear(linear).dequantized(torch.float32), (weight_OD / scale_O1).round() * scale_O1)


def test_nf4_rounds_each_block_to_sixteen_values(linear: nn.Linear) -> None:
    """Eq. (2); here a block is a row."""
    scale_O1 = linear.weight.abs().amax(1, keepdim=True)
    expected = nearest(linear.weight / scale_O1, torch.tensor(NF4_CODE)) * scale_O1
    torch.testing.assert_close(Nf4Linear(linear).dequantized(torch.float32), expected)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_passes_multiply_by_the_restored_weights(
    linear: nn.Linear, kind: Quantization, dtype: torch.dtype
) -> None:
    """Neither activations nor gradients are rounded to fewer bits than their dtype has."""
    quantized = KINDS[kind](linear)
    x = torch.randn(2, 5, BLOCK, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = quantized(x)
    weight_OD = quantized.dequantized(dtype)
    assert torch.equal(y, F.linear(x, weight_OD, linear.bias.to(dtype)))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.ones_like(y) @ weight_OD)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_decoder_is_quantized_and_nothing_else(folder_of: Folders, kind: Quantization) -> None:
    """Every linear of the decoder keeps its shape; embeddings, norms and output head keep the dtype."""
    settings = BackboneSettings(model=str(folder_of("qwen3")), dtype="float32", device="cpu", quantization=kind)
    shape = outline(settings)
    model = load(settings, shape).model
    decoder = model.get_decoder()
    assert {f"model.{name}": size for name, size in linear_shapes(decoder).items()} == shape.linears
    assert all(type(model.get_submodule(name)) is KINDS[kind] for name in shape.linears)
    others = {
        parameter.dtype
        for module in model.modules()
        if not isinstance(module, QuantizedLinear)
        for parameter in module.parameters(recurse=False)
    }
    assert others == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert plain_head(model) is model.get_output_embeddings()


def test_an_image_text_model_keeps_its_tower() -> None:
    """Vision tower and projector are not quantized."""
    settings = BackboneSettings(model="builtin:nano-vl", dtype="float32", device="cpu", quantization="int8")
    shape = outline(settings)
    model = load(settings, shape).model
    assert all(type(model.get_submodule(name)) is nn.Linear for name in shape.tower_linears)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == len(shape.linears)


def test_logits_stay_near_those_of_the_unquantized_model() -> None:
    """int8 is nearer than nf4, and both are near."""
    ids = torch.arange(100, 112)[None]

    def logits(kind: Quantization) -> Tensor:
        settings = BackboneSettings(dtype="float32", device="cpu", quantization=kind)
        with torch.no_grad():
            result: Tensor = load(settings, outline(settings)).model(input_ids=ids).logits
        return result

    exact = logits("none")
    distance = {kind: float((logits(kind) - exact).norm() / exact.norm()) for kind in KINDS}
    assert 0 < distance["int8"] < distance["nf4"] < 0.5


def test_a_missing_package_is_found_before_any_weight_is_read(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    settings = BackboneSettings(model=str(folder_of("qwen3")), quantization="nf4")
    with pytest.raises(ConfigError, match=r"pip install 'streamlearn\[quantization\]'"):
        outline(settings)
