"""Which arithmetic this machine is good at.

bfloat16 doubles a step's speed or better where the CPU multiplies it natively (AMX, AVX512-BF16) or on a GPU; where it
is emulated a product was measured 130 times slower than float32. So the machine is asked, and the answer goes into the
log and the manifest.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Arithmetic:
    """The dtype of the frozen weights and activations, and why."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """`bfloat16` or `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose(wanted: Literal["auto", "bfloat16", "float32"], device: torch.device) -> Arithmetic:
    """The configured dtype, or for `auto` the one that this device multiplies faster."""
    if wanted != "auto":
        return Arithmetic(getattr(torch, wanted), "configured")
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Arithmetic(
            torch.bfloat16 if native else torch.float32, "the GPU " + ("has" if native else "lacks") + " bf16"
        )
    if not cpu_multiplies_bf16():
        return Arithmetic(torch.float32, "the CPU has neither AMX nor AVX512-BF16")
    ratio = product_seconds(torch.float32) / product_seconds(torch.bfloat16)
    faster = ratio > 1
    return Arithmetic(
        torch.bfloat16 if faster else torch.float32,
        f"a bf16 product runs at {ratio:.1f} times the speed of float32 here",
    )


def cpu_multiplies_bf16() -> bool:
    """Whether the instruction set has bf16 products."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    if capabilities == "NO AVX":
        return False
    checks = (
        "_is_amx_tile_supported",
        "_is_avx512_bf16_supported",
    )  # private in torch 2.9 to 2.13; absent means unknown
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def product_seconds(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """Fastest of a few (size, size) products, seconds."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one also builds the kernel
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return best
