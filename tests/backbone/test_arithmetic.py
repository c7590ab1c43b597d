"""The chosen dtype, for each kind of machine."""

import itertools

import pytest
import torch

from streamlearn.backbone import load as arithmetic
from streamlearn.backbone.load import choose, cpu_multiplies_bf16, product_seconds

CPU = torch.device("cpu")


def forbidden(*_: object, **__: object) -> float:
    raise AssertionError("no measurement expected")


@pytest.mark.parametrize("expected", ["bfloat16", "float32"])
def test_a_configured_dtype_needs_no_measurement(expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured dtype is used without any test of the machine."""
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", forbidden)
    monkeypatch.setattr(arithmetic, "product_seconds", forbidden)
    chosen = choose(expected, CPU)  # type: ignore[arg-type]  # one of the two literals
    assert (chosen.name, chosen.dtype, chosen.reason) == (expected, getattr(torch, expected), "configured")


def test_auto_never_measures_an_emulated_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 products computes in float32; the slow product is not measured."""
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(arithmetic, "product_seconds", forbidden)
    chosen = choose("auto", CPU)
    assert chosen.dtype is torch.float32
    assert chosen.reason == "the CPU has neither AMX nor AVX512-BF16"


@pytest.mark.parametrize(
    ("bf16_seconds", "dtype", "ratio"), [(0.5, torch.bfloat16, "2.0"), (2.0, torch.float32, "0.5")]
)
def test_auto_takes_the_faster_product(
    bf16_seconds: float, dtype: torch.dtype, ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with bf16 products they are measured, and the reason states the ratio."""
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: True)
    monkeypatch.setattr(arithmetic, "product_seconds", lambda d: bf16_seconds if d is torch.bfloat16 else 1.0)
    chosen = choose("auto", CPU)
    assert chosen.dtype is dtype
    assert chosen.reason == f"a bf16 product runs at {ratio} times the speed of float32 here"


@pytest.mark.parametrize(
    ("native", "dtype", "reason"),
    [(True, torch.bfloat16, "the GPU has bf16"), (False, torch.float32, "the GPU lacks bf16")],
)
def test_auto_uses_native_bf16_on_a_gpu(
    native: bool, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated bf16 on a GPU does not count."""

    def supported(*, including_emulation: bool) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    chosen = choose("auto", torch.device("cuda"))
    assert (chosen.dtype, chosen.reason) == (dtype, reason)


@pytest.mark.parametrize(
    ("capability", "amx", "avx512_bf16", "expected"),
    [
        ("AVX512", False, False, False),
        ("AVX512", True, False, True),
        ("AVX512", False, True, True),
        ("NO AVX", True, True, False),
    ],
)
def test_a_cpu_multiplies_bf16_with_amx_or_avx512_bf16(
    capability: str, amx: bool, avx512_bf16: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either unit is sufficient, unless torch is configured to use no vector instructions."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    assert cpu_multiplies_bf16() is expected


def test_a_torch_that_cannot_tell_counts_as_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are private to torch; without them, the safe result is False."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    assert cpu_multiplies_bf16() is False


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow runs, such as the first, are ignored."""
    durations = [9.0, 3.0, 2.0, 4.0]
    edges = itertools.chain.from_iterable((100.0 * i, 100.0 * i + d) for i, d in enumerate(durations))
    monkeypatch.setattr("streamlearn.backbone.load.time.perf_counter", lambda: next(edges))
    assert product_seconds(torch.float32, size=2, repeats=3) == 2.0
