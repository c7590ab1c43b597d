"""MoE-LoRA experts beside one frozen linear layer, routed per head slice.

    h_m = x[m S : (m + 1) S],  S = D / H                                                       (1)
    y = W x + (alpha / r) * sum_m sum_{j in S_m} g_mj B_mj A_mj h_m                            (2)

MH-MoE (arXiv 2602.12587) eq. 12 and 14-16; the gate g is eq. 13, here (5); the low-rank form is Hu et al. 2021,
eq. 3. There is no loop over experts and no sorting of tokens: all A are applied in one batched product, the gate is a
mask in the bottleneck (zero where not selected), and all B are applied in one product. The result is exact, shapes are
static, and the gradient of an expert that no token selected is exactly zero.

All regimes share one adapter, or each has its own (`HeadLoraConfig.per_regime`), which applies to that regime's tokens
only, so that the cost of a pass does not depend on the number of regimes. For records that match no regime, a pass may
apply several adapters to the same tokens; the sums of eq. (2) are then averaged.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

from streamlearn.adapters.bottleneck import add_experts, back_to_tokens, back_to_weights, rows_of, split_heads
from streamlearn.adapters.context import AdaptedLayer, RoutingContextHolder, RoutingDecision, Sequences, adapters_of
from streamlearn.adapters.presets import HeadLoraConfig, regime_adapter
from streamlearn.backbone.quantization import Int8Linear, Nf4Linear

# Shape suffixes: T tokens, P tokens of one adapter, B sequences, N regimes, D in features, O out features, H heads,
# S = D / H slice, K experts a head, R rank.


KEEP_NOTHING = (nn.Linear, Int8Linear, Nf4Linear)
"""Linears that keep no output for their backward pass, so that it may be overwritten."""
ROUTER_STD = 0.02  # logits start near zero: the input decides the selection, the probabilities are nearly uniform


class HeadLoraLinear(nn.Module, BaseTunerLayer):  # type: ignore[misc]  # peft is not type-checked here
    """A frozen linear and its experts, by PEFT's adapter name."""

    adapter_layer_names = ("head_lora_A", "head_lora_B", "head_lora_router")
    other_param_names = ("head_lora_config", "head_lora_load", "head_lora_bias", "head_lora_info")
    active_adapters: list[str]  # PEFT's properties
    disable_adapters: bool

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.head_lora_config: dict[str, HeadLoraConfig] = {}
        self.head_lora_A = nn.ParameterDict()
        self.head_lora_B = nn.ParameterDict()
        self.head_lora_router = nn.ParameterDict()
        self.head_lora_load = BufferDict(persistent=False)
        self.head_lora_bias = BufferDict(persistent=False)
        self.head_lora_info: dict[str, AdaptedLayer] = {}
        """Descriptions passed to hooks and parallel adapters."""
        self.context_holder = RoutingContextHolder()
        self.frozen_peft_weight_names: dict[str, tuple[str, ...]] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def update_layer(
        self,
        adapter_name: str,
        config: HeadLoraConfig,
        generator: torch.Generator,
        context_holder: RoutingContextHolder,
        *,
        name: str = "",
        block: str = "",
        is_vision: bool = False,
        owns_router: bool = True,
    ) -> None:
        """Add an adapter: A and router are random, B is zero, so the output does not change yet.

        Args:
            adapter_name: PEFT's name for the adapter.
            config: Its options; `config.regimes` CP biases are created, all zero.
            generator: Source of the random initialization.
            context_holder: Where the layer finds the context of the forward pass in progress.
            name: Field of `AdaptedLayer`.
            block: Field of `AdaptedLayer`.
            is_vision: Field of `AdaptedLayer`.
            owns_router: False for a layer that shares the router of its block's first layer.
        """
        H, K, R, S = config.num_heads, config.num_experts, config.r, self.in_features // config.num_heads
        device = self.base_layer.weight.device
        bound = 1 / math.sqrt(S)  # what kaiming_uniform(a=sqrt(5)) gives for a fan-in of S, LoRA's initialization
        A_HKRS = torch.empty(H, K, R, S).uniform_(-bound, bound, generator=generator)
        self.context_holder = context_holder
        self.head_lora_config[adapter_name] = config
        self.head_lora_info[adapter_name] = AdaptedLayer(
            name, block, is_vision, config.routes, config.scaling, adapter_name
        )
        self.head_lora_A[adapter_name] = nn.Parameter(A_HKRS.to(device))
        self.head_lora_B[adapter_name] = nn.Parameter(torch.zeros(H, K, R, self.out_features, device=device))
        if config.routed:
            self.head_lora_load[adapter_name] = torch.zeros(H, K, dtype=torch.long, device=device)
            self.head_lora_bias[adapter_name] = torch.zeros(H, K, config.regimes, device=device)
        if config.routed and owns_router:
            router_HKS = torch.empty(H, K, S).normal_(0.0, ROUTER_STD, generator=generator)
            is_trained = config.router_gradient != "none"
            self.head_lora_router[adapter_name] = nn.Parameter(router_HKS.to(device), requires_grad=is_trained)
            if not is_trained:  # where PEFT makes adapters trainable
                self.frozen_peft_weight_names[adapter_name] = ("head_lora_router",)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the frozen linear's output plus that of the experts: (..., D) to (..., O)."""
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or not x.numel() or not self.head_lora_info:  # the last adapter may be deleted
            return y
        x, y = x.to(y.dtype), self._writable(y)
        for name, tokens_P, weight in self._adapters(x):
            y = self.experts(name, x, y, tokens_P, weight)
        parallel_adapter = self.context_holder.context.parallel_adapter
        if parallel_adapter is None:
            return y
        return parallel_adapter(next(iter(self.head_lora_info.values())), x, y)

    def _writable(self, y: Tensor) -> Tensor:
        """Return `y`, or a copy where a forward hook or a backward pass may read it later."""
        linear = self.base_layer
        is_own = type(linear) in KEEP_NOTHING and not (linear._forward_hooks or linear._backward_hooks)
        return y if is_own and y.is_contiguous() else y.clone(memory_format=torch.contiguous_format)

    def experts(self, name: str, x: Tensor, y: Tensor, tokens_P: Tensor | None, weight: float = 1.0) -> Tensor:
        """Compute eq. (2) with `y` as W x, in place and in the dtype of `y`.

        `tokens_P` are the indices of the tokens that the adapter applies to; None: all. `weight` is a factor.
        """
        config, A_HKRS, B_HKRO = self.head_lora_config[name], self.head_lora_A[name], self.head_lora_B[name]
        gate_HKP = self.route(name, x, tokens_P) if config.routed else None
        if config.dropout and self.context_holder.context.explore:
            x = dropout(x, config.dropout)
        return add_experts(y, x, A_HKRS, B_HKRO, gate_HKP, tokens_P, scaling=weight * config.scaling)

    def route(self, name: str, x: Tensor, tokens_P: Tensor | None = None) -> Tensor:
        """Compute the gates (H, K, P), zero where not selected; in training passes, also count each expert's load."""
        x_TD = x.reshape(-1, self.in_features)
        if self.head_lora_config[name].routes == "tokens":
            return self._decide(name, rows_of(x_TD, tokens_P), len(x_TD), tokens_P).gate_HKT
        gate_HKT = self._route_sequences(name, x)
        return gate_HKT if tokens_P is None else gate_HKT[:, :, tokens_P]

    def _adapters(self, x: Tensor) -> Iterator[tuple[str, Tensor | None, float]]:
        """List the adapters of this pass, each with the indices of its tokens (None: all) and its weight.

        Where each regime has its own adapter, a sequence gets its regime's, or several at equal weights; without one,
        only the frozen linear. Without regimes in the context, PEFT's active adapters apply.
        """
        sequences, num = self.context_holder.context.sequences, x.shape[:-1].numel()
        is_vision = next(iter(self.head_lora_info.values())).is_vision
        if sequences is None or sequences.slots is None:
            yield from ((name, None, 1.0) for name in self.active_adapters if name in self.head_lora_A)
        elif any(config.per_regime for config in self.head_lora_config.values()):
            for slot in sequences.distinct:
                slots, weight = adapters_of(slot)
                names = [name for name in map(regime_adapter, slots) if name in self.head_lora_A]
                tokens_P = sequences.tokens_of(slot, num, is_vision=is_vision) if names else None
                if tokens_P is None or len(tokens_P):  # none in the vision tower, for records without images
                    yield from ((name, tokens_P, weight / len(names)) for name in names)
        elif sequences.distinct:
            tokens_P = sequences.tokens_with_regime(num, is_vision=is_vision)
            yield from ((name, tokens_P, 1.0) for name in self.active_adapters if name in self.head_lora_A)

    def _route_sequences(self, name: str, x: Tensor) -> Tensor:
        """Apply one gate per block: its first layer decides for each sequence, the others follow (MoT eq. 1)."""
        context, block = self.context_holder.context, self.head_lora_info[name].block
        segment_ids_T, num = _segments(context.sequences, x)
        decisions, key = context.block_decisions, (name, block)
        if name in self.head_lora_router and not (context.decoding and key in decisions):
            h_BD = _means(x.reshape(-1, self.in_features), segment_ids_T, num, context.prompt_T)
            decisions[key] = self._decide(name, h_BD, len(h_BD))
        else:
            self._count(name, decisions[key].selected_HKT)
        return decisions[key].gate_HKT[:, :, segment_ids_T]

    def _decide(self, name: str, h_TD: Tensor, num: int, tokens_P: Tensor | None = None) -> RoutingDecision:
        """Decide for the tokens `tokens_P` of `num`, or for all, or for `num` sequences."""
        decision = self._select(name, logits(h_TD, self.head_lora_router[name]), num, tokens_P)
        for hook in self.context_holder.context.hooks:
            hook(self.head_lora_info[name], decision)
        return decision

    def _select(self, name: str, native_HKT: Tensor, num: int, tokens_P: Tensor | None) -> RoutingDecision:
        """Select by native logits plus CP bias (CP-MoE eq. 10) plus, for sequences in training, noise (MoT eq. 1)."""
        config, context = self.head_lora_config[name], self.context_holder.context
        biased_HKT = native_HKT
        if config.regimes:
            is_vision = self.head_lora_info[name].is_vision
            per_token, sequences = config.routes == "tokens", context.sequences
            slots_T = None if sequences is None else sequences.slots_of(num, per_token=per_token, is_vision=is_vision)
            if slots_T is not None:
                slots_P = rows_of(slots_T, tokens_P).clamp_min(0)  # a sequence without a regime is not computed
                biased_HKT = native_HKT + self.head_lora_bias[name].index_select(2, slots_P)
        ranked_HKT = biased_HKT.detach()
        if config.noise and context.explore:
            ranked_HKT = ranked_HKT + config.noise * torch.rand_like(ranked_HKT)
        selected_HKT = select(ranked_HKT, config.selected)
        self._count(name, selected_HKT)
        gate_HKT = gate(biased_HKT, selected_HKT, config)
        return RoutingDecision(native_HKT, selected_HKT, gate_HKT, tokens_P, num)

    def _count(self, name: str, selected_HKT: Tensor) -> None:
        """Count the load of a training pass."""
        if torch.is_grad_enabled() and not self.context_holder.context.recomputing:
            self.head_lora_load[name] += selected_HKT.sum(-1)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move without casting: experts stay float32 on any backbone, otherwise loading would round them."""
        target = self.base_layer.weight.device if device is None else device
        parts = (self.head_lora_A, self.head_lora_B, self.head_lora_router, self.head_lora_load, self.head_lora_bias)
        for tensors in parts:
            if adapter_name in tensors and tensors[adapter_name].device != torch.device("meta"):
                tensors[adapter_name] = tensors[adapter_name].to(target)


def _segments(sequences: Sequences | None, x: Tensor) -> tuple[Tensor, int]:
    """Return the sequence index of each token of the flattened (..., T, D), and the number of sequences."""
    num = x.shape[:-1].numel()
    if sequences is not None:
        return sequences.segment_ids(num), sequences.num
    rows = num // x.shape[-2]
    return torch.arange(rows, device=x.device).repeat_interleave(x.shape[-2], output_size=num), rows


def _means(x_TD: Tensor, segment_ids_T: Tensor, num: int, prompt_T: Tensor | None) -> Tensor:
    """Average over each sequence's prompt, (B, D) float32. MoT sums, which sharpens the gate as prompts get longer."""
    weight_T1 = torch.ones_like(segment_ids_T) if prompt_T is None else prompt_T
    weight_T1 = weight_T1.float()[:, None]
    sums_BD = torch.zeros(num, x_TD.shape[1], device=x_TD.device).index_add(0, segment_ids_T, x_TD.float() * weight_T1)
    counts_B1 = torch.zeros(num, 1, device=x_TD.device).index_add(0, segment_ids_T, weight_T1)
    return sums_BD / counts_B1.clamp_min(1)


# Which experts a head slice is routed to, and their weights.
#
#     a_m = W_m h_m                                          logits, K a head            (3)
#     S_m = TopK(a_m, k)                                     exactly k, also under ties  (4)
#     g_mj = exp(a_mj) / sum_{q in S_m} exp(a_mq), j in S_m  zero elsewhere              (5)
#     p_mj = exp(a_mj) / sum_q exp(a_mq)                     the native probability      (6)
#
# (6) without a selection is LoRAMoE's gate (arXiv 2312.09979, eq. 3). Tokens are the last dimension.
#
# With k = 1, (5) is the constant 1 and the router gets no gradient from the task loss. Three alternatives, on SuperNI's
# order 1 (200 records per task, nano backbone, preset mh-moe, one seed; prequential loss):
#
#     straight_through: (5) forward, (6) backward    AP .347  AF .043  loss 3.41
#     native: (6) is the gate                        AP .352  AF .029  loss 3.53
#     none: the router keeps its initialization      AP .358  AF .029  loss 3.41
#
# `native` scales every update by about 1/K and learns more slowly; a trained router forgets more than a frozen one.
# `mh-moe` uses straight_through, because its paper trains the router; `streamlearn` lowers its rate to a tenth.


def logits(x_TD: Tensor, router_HKS: Tensor) -> Tensor:
    """Compute eq. (3), (H, K, T), in float32 or wider."""
    a_HKT: Tensor = _Logits.apply(x_TD, router_HKS)  # type: ignore[no-untyped-call]
    return a_HKT


class _Logits(torch.autograd.Function):
    """Eq. (3) with a backward in the tokens' own dtype and memory layout; autograd's would copy x twice."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, router_HKS: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, router_HKS)
        wide = torch.promote_types(x_TD.dtype, router_HKS.dtype)  # float32: bf16 would tie logits that differ by 0.4 %
        with torch.autocast(x_TD.device.type, enabled=False):
            return torch.bmm(router_HKS.to(wide), split_heads(x_TD.to(wide), len(router_HKS)).mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_HKT: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, router_HKS = ctx.saved_tensors
        needs_x, needs_router = ctx.needs_input_grad
        da_HKT = da_HKT.to(x_TD.dtype)
        return (
            back_to_tokens(da_HKT, router_HKS.to(x_TD.dtype)) if needs_x else None,
            back_to_weights(da_HKT, x_TD) if needs_router else None,
        )


def select(a_HKT: Tensor, k: int) -> Tensor:
    """Compute eq. (4), a bool mask (H, K, T) with exactly `k` True for every head and token; the first wins a tie."""
    # argmax is 30 times slower than max
    top_HkT = a_HKT.max(1, keepdim=True).indices if k == 1 else a_HKT.topk(k, dim=1).indices
    return torch.zeros_like(a_HKT, dtype=torch.bool).scatter_(1, top_HkT, True)


def gate(a_HKT: Tensor, selected_HKT: Tensor, config: HeadLoraConfig) -> Tensor:
    """Compute the gates (H, K, T) as `config` defines them, given `selected_HKT = select(a_HKT, config.selected)`."""
    if config.gate == "softmax" or config.router_gradient == "native":
        native = a_HKT.softmax(1) * selected_HKT
        return native.detach() if config.router_gradient == "none" else native
    if config.router_gradient == "none":
        return _over_selected(a_HKT.detach(), selected_HKT, config.selected)
    if config.router_gradient == "selected":
        return _over_selected(a_HKT, selected_HKT, config.selected)
    value: Tensor = _StraightThrough.apply(a_HKT, selected_HKT, config.selected)  # type: ignore[no-untyped-call]
    return value


class _StraightThrough(torch.autograd.Function):
    """Eq. (5) forward; backward that of p_mj of eq. (6) for the selected experts, zero for the others.

    da_mj = p_mj (g_mj - sum_{q in S_m} g_mq p_mq),  g_mj the gradient of the gate if selected, else zero    (7)
    """

    @staticmethod
    def forward(ctx: Any, a_HKT: Tensor, selected_HKT: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(a_HKT, selected_HKT)
        return _over_selected(a_HKT, selected_HKT, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgate_HKT: Tensor) -> tuple[Tensor, None, None]:
        a_HKT, selected_HKT = ctx.saved_tensors
        p_HKT, g_HKT = a_HKT.softmax(1), dgate_HKT * selected_HKT
        return p_HKT * (g_HKT - (g_HKT * p_HKT).sum(1, keepdim=True)), None, None


def _over_selected(a_HKT: Tensor, selected_HKT: Tensor, k: int) -> Tensor:
    """Compute eq. (5); over a single expert it is the constant 1."""
    if k == 1:
        return selected_HKT.to(a_HKT.dtype)
    return a_HKT.masked_fill(~selected_HKT, -torch.inf).softmax(1)
