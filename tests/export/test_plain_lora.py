"""Plain LoRAs against the sums of the adapter layer, spelled as a loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamlearn.adapters.presets import HeadLoraConfig, adapter_bytes, snapshot_bytes
from streamlearn.export.lora import expert_weights, plain_lora

LINEAR = "model.layers.0.mlp.up_proj"
IN, OUT = 24, 10


def weights_of(config: HeadLoraConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    H, K, R = config.num_heads, config.num_experts, config.r
    return {
        f"base_model.model.{LINEAR}.head_lora_A": torch.randn(H, K, R, IN // H, generator=generator),
        f"base_model.model.{LINEAR}.head_lora_B": torch.randn(H, K, R, OUT, generator=generator),
        f"base_model.model.{LINEAR}.head_lora_router": torch.randn(H, K, IN // H, generator=generator),
    }


def looped(weights: dict[str, Tensor], config: HeadLoraConfig, x_D: Tensor, gate_HK: Tensor) -> Tensor:
    """Eq. (2) of `adapters.layer` without W x, expert by expert."""
    A, B, _ = weights.values()
    slices = x_D.reshape(config.num_heads, -1)
    return config.scaling * torch.stack(
        [
            gate_HK[m, j] * B[m, j].T @ (A[m, j] @ slices[m])
            for m in range(config.num_heads)
            for j in range(config.num_experts)
        ]
    ).sum(0)


@given(heads=st.sampled_from([1, 2, 3, 4]), rank=st.integers(1, 3), alpha=st.floats(0.5, 9))
def test_one_expert_a_head_is_a_plain_lora(heads: int, rank: int, alpha: float) -> None:
    config = HeadLoraConfig(r=rank, alpha=alpha, num_heads=heads, num_experts=1, top_k=1)
    weights, x_D = weights_of(config), torch.randn(IN, generator=torch.Generator().manual_seed(1))
    lora = plain_lora(weights, config)
    matrices = lora.layers[LINEAR]
    assert lora.rank == heads * rank
    assert matrices.A_ND.shape == (lora.rank, IN)
    assert matrices.B_ON.shape == (OUT, lora.rank)
    shapes = {LINEAR: (IN, OUT)}
    moments = adapter_bytes(config, shapes) * 2 // 3
    assert matrices.A_ND.nbytes + matrices.B_ON.nbytes + moments == snapshot_bytes(config, shapes)
    expected = looped(weights, config, x_D, torch.ones(heads, 1))
    torch.testing.assert_close(lora.scaling * matrices.B_ON @ (matrices.A_ND @ x_D), expected, rtol=1e-4, atol=1e-4)


@given(heads=st.sampled_from([1, 2, 3, 4]), rank=st.integers(1, 3))
def test_the_experts_come_back_bit_for_bit(heads: int, rank: int) -> None:
    config = HeadLoraConfig(r=rank, num_heads=heads, num_experts=1, top_k=1)
    A, B, _ = weights_of(config).items()
    again = expert_weights(plain_lora(dict([A, B]), config), config)
    assert list(again) == [A[0], B[0]]
    assert all(torch.equal(again[name], tensor) for name, tensor in (A, B))


def test_mean_gates_weigh_the_experts() -> None:
    """Eq. (2): each expert of a head applies with its own weight, for every token."""
    config = HeadLoraConfig(r=2, alpha=5.0, num_heads=3, num_experts=4, top_k=2)
    weights, x_D = weights_of(config), torch.randn(IN, generator=torch.Generator().manual_seed(1))
    gate_HK = torch.rand(3, 4, generator=torch.Generator().manual_seed(2))
    lora = plain_lora(weights, config, {LINEAR: gate_HK})
    matrices = lora.layers[LINEAR]
    assert lora.rank == 3 * 4 * 2
    expected = looped(weights, config, x_D, gate_HK)
    torch.testing.assert_close(lora.scaling * matrices.B_ON @ (matrices.A_ND @ x_D), expected, rtol=1e-4, atol=1e-4)
