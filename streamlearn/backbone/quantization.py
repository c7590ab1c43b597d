"""Frozen linears whose weights take 8 or 4 bits, and are computed in the dtype of the activations.

    int8    w_od = s_o q_od / 127     q in -127 ... 127,  s_o = max_d |w_od|                             (1)
    nf4     w_i = s_b c[q_i]          q in 0 ... 15,      s_b = max |w| over a block of 32 weights       (2)

(1) is the weights' form in LLM.int8() (arXiv 2208.07339, section 2.1), (2) NormalFloat of QLoRA (arXiv 2305.14314,
section 3), c its 16 quantiles of a normal distribution. Activations and gradients are not rounded: each pass multiplies
by the weights that (1) and (2) give, restored for one product and dropped after it.

bitsandbytes rounds and restores the weights. Its modules are not used: its 8-bit product rounds activations too, and
keeps them outside of autograd's saved tensors, where checkpointing cannot drop them; its 4-bit one repacks the weights
for good in a pass without gradient, and asks the hub for a kernel.
"""
# Shape suffixes: O out features, D in features, N any.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from streamlearn.errors import ConfigError
from streamlearn.settings import Quantization

BLOCK = 32
"""Weights that share a scale in eq. (2). QLoRA has 64: a tenth less memory, and more loss."""


class QuantizedLinear(nn.Linear):
    """A frozen linear with quantized weights; `weight` holds the numbers q."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would allocate weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        numbers, scale = self._quantize(linear.weight.detach())
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute W x + b in the dtype of `x`: (..., D) to (..., O). No gradient is computed for W and b."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, (O, D)."""
        raise NotImplementedError

    @staticmethod
    def _quantize(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers, and their scales in float32."""
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    """A frozen linear with weights as in eq. (1)."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Compute eq. (1), in float32, and round to `dtype`."""
        return self.weight.to(dtype).mul_(self.scale[:, None])

    @staticmethod
    def _quantize(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
        numbers_OD, largest_O, _ = _functions().int8_vectorwise_quant(weight_OD.to(torch.float16))  # its only dtype
        return numbers_OD, largest_O / 127


class Nf4Linear(QuantizedLinear):
    """A frozen linear with weights as in eq. (2)."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Compute eq. (2)."""
        functions, shape = _functions(), torch.Size((self.out_features, self.in_features))
        state = functions.QuantState(self.scale, shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
        weight_OD: Tensor = functions.dequantize_4bit(self.weight, state)
        return weight_OD

    @staticmethod
    def _quantize(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
        numbers_N1, state = _functions().quantize_4bit(weight_OD.contiguous(), blocksize=BLOCK, quant_type="nf4")
        return numbers_N1, state.absmax


KINDS: Mapping[Quantization, type[QuantizedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}


class _Product(torch.autograd.Function):
    """Restores the weights in both passes; nothing is stored between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return F.linear(x, linear.dequantized(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.linear.dequantized(dy.dtype), None


def quantize(model: Any, kind: Quantization, dtype: torch.dtype) -> None:
    """Quantize the linears of the decoder in place; all other parameters get `dtype`.

    Embeddings, output head, vision tower and norms keep their precision: together they are small in a large model, and
    sensitive in any.

    Args:
        model: A language or image-text model; best in the dtype of its files, so that weights are rounded once.
        kind: int8 or nf4.
        dtype: Dtype of the activations.
    """
    for parent in list(model.get_decoder().modules()):
        for name, linear in parent.named_children():
            if isinstance(linear, nn.Linear):
                setattr(parent, name, KINDS[kind](linear))
    for parameter in model.parameters():
        if parameter.is_floating_point():  # buffers, such as rotary frequencies and scales, stay float32
            parameter.data = parameter.data.to(dtype, copy=True)  # nothing is left in the mapped file, which is closed


def check_installed(kind: Quantization) -> None:
    """Check that the package for this quantization is installed.

    Raises:
        ConfigError: bitsandbytes is missing.
    """
    if kind != "none":
        _functions()


def _functions() -> Any:
    try:
        from bitsandbytes import functional  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "backbone.quantization needs package bitsandbytes: pip install 'streamlearn[quantization]', or set it to "
            "none"
        ) from error
    return functional
