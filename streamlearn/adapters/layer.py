"""MoE-LoRA experts beside one frozen linear layer, routed per head slice.

    h_m = x[m S : (m + 1) S],  S = D / H                                                       (1)
    y = W x + (alpha / r) * sum_m sum_{j in S_m} g_mj B_mj A_mj h_m                            (2)

MH-MoE (arXiv 2602.12587) eq. 12 and 14-16; the gate g is `routing`'s, eq. 13; the low-rank form is Hu et al. 2021,
eq. 3. There is no loop over experts and no sorting of tokens: every A is applied in one batched product, the gate is a
mask in the bottleneck (zero where not selected), and every B is applied in one product. That is exact, shapes are
static, and an expert that no token chose gets a gradient of exactly zero.
"""
# Shape suffixes: T tokens, B sequences, N regimes, D in features, O out features, H heads, S = D / H slice, K experts a
# head, R rank.

import math
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from streamlearn.adapters import routing
from streamlearn.adapters.bottleneck import add_experts
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.adapters.routing_context import RoutingContext, RoutingContextHolder, RoutingDecision

NO_MERGE = (
    "experts that are chosen per token are not one weight matrix and cannot be merged; keep the adapter beside the "
    "model: save_pretrained, then PeftModel.from_pretrained"
)
ROUTER_STD = 0.02  # logits start near zero: the choice is the input's, the probabilities are nearly even


class HeadLoraLinear(nn.Module, BaseTunerLayer):  # type: ignore[misc]  # peft is not type-checked here
    """A frozen linear with its experts, under PEFT's adapter names."""

    adapter_layer_names = ("head_lora_A", "head_lora_B", "head_lora_router")
    other_param_names = ("head_lora_config", "head_lora_load", "head_lora_bias", "head_lora_block")
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
        self.head_lora_block: dict[str, str] = {}
        self.context_holder = RoutingContextHolder()
        self.is_vision = False
        """Whether it belongs to a vision tower or projector: its tokens are images', not the sequence's."""
        self.frozen_peft_weight_names: dict[str, tuple[str, ...]] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def update_layer(
        self,
        name: str,
        config: HeadLoraConfig,
        generator: torch.Generator,
        context_holder: RoutingContextHolder,
        *,
        block: str = "",
        owns_router: bool = True,
        regimes: int = 0,
    ) -> None:
        """Give the layer an adapter: A and the routers random, B zero, so that the output does not change.

        `block` names the transformer block; where whole sequences are routed, only its first layer owns a router.
        `regimes` is the number of CP biases, all zero at first.
        """
        H, K, R, S = config.num_heads, config.num_experts, config.r, self.in_features // config.num_heads
        device = self.base_layer.weight.device
        bound = 1 / math.sqrt(S)  # what kaiming_uniform(a=sqrt(5)) gives for a fan-in of S, LoRA's initialisation
        A_HKRS = torch.empty(H, K, R, S).uniform_(-bound, bound, generator=generator)
        self.context_holder = context_holder
        self.head_lora_config[name] = config
        self.head_lora_block[name] = block
        self.head_lora_A[name] = nn.Parameter(A_HKRS.to(device))
        self.head_lora_B[name] = nn.Parameter(torch.zeros(H, K, R, self.out_features, device=device))
        self.head_lora_load[name] = torch.zeros(H, K, dtype=torch.long, device=device)
        if config.routed:
            self.head_lora_bias[name] = torch.zeros(H, K, regimes, device=device)
        if config.routed and owns_router:
            router_HKS = torch.empty(H, K, S).normal_(0.0, ROUTER_STD, generator=generator)
            self.head_lora_router[name] = nn.Parameter(router_HKS.to(device))
            if config.router_gradient == "none":
                self.frozen_peft_weight_names[name] = ("head_lora_router",)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The frozen linear's output plus the experts', for (..., D)."""
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            if name in self.head_lora_A:
                y = self.experts(name, x.to(y.dtype), y)
        parallel_adapter = self.context_holder.context.parallel_adapter
        return y if parallel_adapter is None else parallel_adapter(self, x.to(y.dtype), y)

    def experts(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Eq. (2) with `y` as W x, in its precision and its memory."""
        config, A_HKRS, B_HKRO = self.head_lora_config[name], self.head_lora_A[name], self.head_lora_B[name]
        gate_HKT = self.route(name, x) if config.routed else None
        return add_experts(y, x, A_HKRS, B_HKRO, gate_HKT, scaling=config.scaling)

    def route(self, name: str, x: Tensor) -> Tensor:
        """The gates (H, K, T), zero where not selected; training passes also count what each expert got."""
        if self.head_lora_config[name].routes == "sequences":
            return self._route_sequences(name, x)
        context = self.context_holder.context
        routed = self._choose(name, routing.logits(x.reshape(-1, self.in_features), self.head_lora_router[name]))
        for hook in context.hooks:
            hook(self, routed)
        return routed.gate_HKT

    def _route_sequences(self, name: str, x: Tensor) -> Tensor:
        """One gate a block: its first layer chooses for each sequence, the others follow (MoT eq. 1)."""
        context, block = self.context_holder.context, self.head_lora_block[name]
        segment_ids_T = _segment_ids(context, x)
        if name in self.head_lora_router and not (context.decoding and block in context.choices):
            h_BD = _means(x.reshape(-1, self.in_features), segment_ids_T, context.prompt_T)
            context.choices[block] = self._choose(name, routing.logits(h_BD, self.head_lora_router[name]))
            for hook in context.hooks:
                hook(self, context.choices[block])
        elif torch.is_grad_enabled():
            self.head_lora_load[name] += context.choices[block].selected_HKT.sum(-1)
        return context.choices[block].gate_HKT[:, :, segment_ids_T]

    def _choose(self, name: str, native_HKT: Tensor) -> RoutingDecision:
        """Select by native logits plus CP bias (CP-MoE eq. 10) plus, for sequences in training, noise (MoT eq. 1)."""
        config, context = self.head_lora_config[name], self.context_holder.context
        slots_T = context.slots_of(native_HKT.shape[-1], per_token=config.routes == "tokens", is_vision=self.is_vision)
        bias_HKN = self.head_lora_bias[name]
        biased_HKT = native_HKT
        if slots_T is not None and bias_HKN.shape[-1]:
            biased_HKT = native_HKT + bias_HKN.index_select(2, slots_T)
        ranked_HKT = biased_HKT.detach()
        if config.noise and context.explore:
            ranked_HKT = ranked_HKT + config.noise * torch.rand_like(ranked_HKT)
        selected_HKT = routing.select(ranked_HKT, config.selected)
        if torch.is_grad_enabled():
            self.head_lora_load[name] += selected_HKT.sum(-1)
        return RoutingDecision(native_HKT, selected_HKT, routing.gate(biased_HKT, selected_HKT, config))

    def reset_load(self) -> None:
        """Forget how many tokens each expert got."""
        for load in self.head_lora_load.values():
            load.zero_()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: which experts apply depends on the token."""
        raise NotImplementedError(NO_MERGE)

    def unmerge(self) -> None:
        """Refused, as `merge` is."""
        raise NotImplementedError(NO_MERGE)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move, never cast: the experts stay float32 whatever the backbone is, or loading would round them."""
        target = self.base_layer.weight.device if device is None else device
        moved = (self.head_lora_A, self.head_lora_B, self.head_lora_router, self.head_lora_load, self.head_lora_bias)
        for held in moved:
            if adapter_name in held and held[adapter_name].device != torch.device("meta"):
                held[adapter_name] = held[adapter_name].to(target)


def _segment_ids(context: RoutingContext, x: Tensor) -> Tensor:
    """Which sequence each token of the flattened (..., T, D) belongs to."""
    if context.segment_ids_T is not None:
        return context.segment_ids_T
    rows = torch.arange(x.shape[:-1].numel() // x.shape[-2], device=x.device)
    return rows.repeat_interleave(x.shape[-2])


def _means(x_TD: Tensor, segment_ids_T: Tensor, prompt_T: Tensor | None) -> Tensor:
    """Mean over each sequence's prompt, (B, D) in float32: MoT sums, which would make the gate colder by length."""
    weight_T1 = torch.ones_like(segment_ids_T) if prompt_T is None else prompt_T
    weight_T1 = weight_T1.float()[:, None]
    num = int(segment_ids_T[-1]) + 1
    sums_BD = torch.zeros(num, x_TD.shape[1], device=x_TD.device).index_add(0, segment_ids_T, x_TD.float() * weight_T1)
    counts_B1 = torch.zeros(num, 1, device=x_TD.device).index_add(0, segment_ids_T, weight_T1)
    return sums_BD / counts_B1.clamp_min(1)
