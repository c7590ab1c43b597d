"""The dtype of the frozen weights and activations.

Where the CPU multiplies bfloat16 natively (AMX, AVX512-BF16), and on a GPU, it makes a step at least twice as fast.
Where it is emulated, a product was measured 130 times slower than in float32. So `auto` tests the machine; the result
is logged and recorded in the manifest.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Arithmetic:
    """A dtype, and the reason for it."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """`bfloat16` or `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose(configured: Literal["auto", "bfloat16", "float32"], device: torch.device) -> Arithmetic:
    """Return the configured dtype; for `auto`, the faster one on this device."""
    if configured != "auto":
        return Arithmetic(getattr(torch, configured), "configured")
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        if native:
            return Arithmetic(torch.bfloat16, "the GPU has bf16")
        return Arithmetic(torch.float32, "the GPU lacks bf16")
    if not cpu_multiplies_bf16():
        return Arithmetic(torch.float32, "the CPU has neither AMX nor AVX512-BF16")
    ratio = product_seconds(torch.float32) / product_seconds(torch.bfloat16)
    faster = torch.bfloat16 if ratio > 1 else torch.float32
    return Arithmetic(faster, f"a bf16 product runs at {ratio:.1f} times the speed of float32 here")


def cpu_multiplies_bf16() -> bool:
    """Whether the instruction set has bf16 products; False if torch cannot tell."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    if capabilities == "NO AVX":
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # private in torch 2.9 to 2.13
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def product_seconds(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """Time the product of two (size, size) matrices on the CPU: seconds, the fastest of a few."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one includes building the kernel
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return best
