"""MoE-LoRA experts beside one frozen linear layer, routed per head slice.

    h_m = x[m S : (m + 1) S],  S = D / H                                                       (1)
    y = W x + (alpha / r) * sum_m sum_{j in S_m} g_mj B_mj A_mj h_m                            (2)

MH-MoE (arXiv 2602.12587) eq. 12 and 14-16; the gate g is eq. 13, see `routing`; the low-rank form is Hu et al. 2021,
eq. 3. There is no loop over experts and no sorting of tokens: all A are applied in one batched product, the gate is a
mask in the bottleneck (zero where not selected), and all B are applied in one product. The result is exact, shapes are
static, and the gradient of an expert that no token selected is exactly zero.
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
from streamlearn.adapters.routing_context import AdaptedLayer, RoutingContext, RoutingContextHolder, RoutingDecision
from streamlearn.adapters.usable import UsableExperts, rows, take

NO_MERGE = (
    "experts that are selected per token are not one weight matrix and cannot be merged; keep the adapter separate: "
    "save_pretrained, then PeftModel.from_pretrained"
)
ROUTER_STD = 0.02  # logits start near zero: the input decides the selection, the probabilities are nearly uniform


class HeadLoraLinear(nn.Module, BaseTunerLayer):  # type: ignore[misc]  # peft is not type-checked here
    """A frozen linear and its experts, keyed by PEFT's adapter name."""

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
        self.usable: dict[str, UsableExperts] = {}
        self.head_lora_info: dict[str, AdaptedLayer] = {}
        """What hooks and parallel adapters receive."""
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
            name: See `AdaptedLayer.name`.
            block: See `AdaptedLayer.block`.
            is_vision: See `AdaptedLayer.is_vision`.
            owns_router: False for a layer that shares the router of its block's first layer.
        """
        H, K, R, S = config.num_heads, config.num_experts, config.r, self.in_features // config.num_heads
        device = self.base_layer.weight.device
        bound = 1 / math.sqrt(S)  # what kaiming_uniform(a=sqrt(5)) gives for a fan-in of S, LoRA's initialisation
        A_HKRS = torch.empty(H, K, R, S).uniform_(-bound, bound, generator=generator)
        self.context_holder = context_holder
        self.head_lora_config[adapter_name] = config
        self.usable[adapter_name] = UsableExperts()
        self.head_lora_info[adapter_name] = AdaptedLayer(name, block, is_vision, config.routes, config.scaling)
        self.head_lora_A[adapter_name] = nn.Parameter(A_HKRS.to(device))
        self.head_lora_B[adapter_name] = nn.Parameter(torch.zeros(H, K, R, self.out_features, device=device))
        self.head_lora_load[adapter_name] = torch.zeros(H, K, dtype=torch.long, device=device)
        if config.routed:
            self.head_lora_bias[adapter_name] = torch.zeros(H, K, config.regimes, device=device)
        if config.routed and owns_router:
            router_HKS = torch.empty(H, K, S).normal_(0.0, ROUTER_STD, generator=generator)
            self.head_lora_router[adapter_name] = nn.Parameter(router_HKS.to(device))
            if config.router_gradient == "none":
                self.frozen_peft_weight_names[adapter_name] = ("head_lora_router",)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the frozen linear's output plus that of the experts: (..., D) to (..., O)."""
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            if name in self.head_lora_A:
                y = self.experts(name, x.to(y.dtype), y)
        parallel_adapter = self.context_holder.context.parallel_adapter
        if parallel_adapter is None:
            return y
        return parallel_adapter(self.head_lora_info[self.active_adapters[0]], x.to(y.dtype), y)

    def experts(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Compute eq. (2) with `y` as W x, in place and in the dtype of `y`; tokens without a regime keep W x."""
        config, A_HKRS, B_HKRO = self.head_lora_config[name], self.head_lora_A[name], self.head_lora_B[name]
        context, is_vision = self.context_holder.context, self.head_lora_info[name].is_vision
        if context.slots == ():
            return y
        unrouted_T = context.without_regime(x.shape[:-1].numel(), is_vision=is_vision)
        frozen = None if unrouted_T is None else y.clone()
        usable_HU = self._usable(name)
        gate_HUT = self._gates(name, x, usable_HU) if config.routed else None
        added = add_experts(y, x, A_HKRS, B_HKRO, gate_HUT, usable_HU, scaling=config.scaling)
        if unrouted_T is None or frozen is None:
            return added
        return torch.where(unrouted_T.view(*x.shape[:-1], 1), frozen, added)

    def route(self, name: str, x: Tensor) -> Tensor:
        """Compute the gates (H, K, T), zero where not selected; in training passes, also count each expert's load."""
        if self.head_lora_config[name].routes == "sequences":
            return self._route_sequences(name, x)
        return self._decide(name, x.reshape(-1, self.in_features)).gate_HKT

    def _gates(self, name: str, x: Tensor, usable_HU: Tensor | None) -> Tensor | None:
        """Do the same for the usable experts, (H, U, T); None where no head has a choice and every gate is 1."""
        if usable_HU is None:
            return self.route(name, x)
        if usable_HU.shape[1] > 1 or not self.head_lora_config[name].gate_of_one_is_1:
            return self._decide(name, x.reshape(-1, self.in_features), usable_HU).gate_HKT
        if torch.is_grad_enabled():
            self.head_lora_load[name][rows(usable_HU), usable_HU] += x.shape[:-1].numel()
        return None

    def _usable(self, name: str) -> Tensor | None:
        """Return the experts to compute (H, U); None: all.

        All are computed for hooks, which receive the decision over all, and where one gate serves a whole block.
        """
        context, config = self.context_holder.context, self.head_lora_config[name]
        if not config.regimes or config.routes == "sequences" or context.hooks or context.slots is None:
            return None
        return self.usable[name].of(self.head_lora_bias[name], context.slots, config.selected)

    def _route_sequences(self, name: str, x: Tensor) -> Tensor:
        """One gate per block: its first layer decides for each sequence, the others follow (MoT eq. 1)."""
        context, block = self.context_holder.context, self.head_lora_info[name].block
        segment_ids_T = _segment_ids(context, x)
        if name in self.head_lora_router and not (context.decoding and block in context.block_decisions):
            h_BD = _means(x.reshape(-1, self.in_features), segment_ids_T, context.prompt_T)
            context.block_decisions[block] = self._decide(name, h_BD)
        elif torch.is_grad_enabled():
            self.head_lora_load[name] += context.block_decisions[block].selected_HKT.sum(-1)
        return context.block_decisions[block].gate_HKT[:, :, segment_ids_T]

    def _decide(self, name: str, h_TD: Tensor, usable_HU: Tensor | None = None) -> RoutingDecision:
        decision = self._select(name, routing.logits(h_TD, take(self.head_lora_router[name], usable_HU)), usable_HU)
        for hook in self.context_holder.context.hooks:
            hook(self.head_lora_info[name], decision)
        return decision

    def _select(self, name: str, native_HKT: Tensor, usable_HU: Tensor | None) -> RoutingDecision:
        """Select by native logits plus CP bias (CP-MoE eq. 10) plus, for sequences in training, noise (MoT eq. 1).

        With `usable_HU` the logits and the decision are those of these experts.
        """
        config, context = self.head_lora_config[name], self.context_holder.context
        is_vision = self.head_lora_info[name].is_vision
        slots_T = context.slots_of(native_HKT.shape[-1], per_token=config.routes == "tokens", is_vision=is_vision)
        bias_HKN = take(self.head_lora_bias[name], usable_HU)
        biased_HKT = native_HKT
        if slots_T is not None and bias_HKN.shape[-1]:
            biased_HKT = native_HKT + bias_HKN.index_select(2, slots_T)
        ranked_HKT = biased_HKT.detach()
        if config.noise and context.explore:
            ranked_HKT = ranked_HKT + config.noise * torch.rand_like(ranked_HKT)
        selected_HKT = routing.select(ranked_HKT, config.selected)
        if torch.is_grad_enabled():
            load_HK = self.head_lora_load[name]
            load_HK[... if usable_HU is None else (rows(usable_HU), usable_HU)] += selected_HKT.sum(-1)
        return RoutingDecision(native_HKT, selected_HKT, routing.gate(biased_HKT, selected_HKT, config))

    def reset_load(self) -> None:
        """Set every expert's load to zero."""
        for load in self.head_lora_load.values():
            load.zero_()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse to merge: the experts that apply depend on the token."""
        raise NotImplementedError(NO_MERGE)

    def unmerge(self) -> None:
        """Refuse, as `merge` does."""
        raise NotImplementedError(NO_MERGE)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move without casting: experts stay float32 beside any backbone, otherwise loading would round them."""
        target = self.base_layer.weight.device if device is None else device
        moved = (self.head_lora_A, self.head_lora_B, self.head_lora_router, self.head_lora_load, self.head_lora_bias)
        for tensors in moved:
            if adapter_name in tensors and tensors[adapter_name].device != torch.device("meta"):
                tensors[adapter_name] = tensors[adapter_name].to(target)


def _segment_ids(context: RoutingContext, x: Tensor) -> Tensor:
    """Index of the sequence that each token of the flattened (..., T, D) belongs to."""
    if context.segment_ids_T is not None:
        return context.segment_ids_T
    sequences = torch.arange(x.shape[:-1].numel() // x.shape[-2], device=x.device)
    return sequences.repeat_interleave(x.shape[-2])


def _means(x_TD: Tensor, segment_ids_T: Tensor, prompt_T: Tensor | None) -> Tensor:
    """Mean over each sequence's prompt, (B, D) float32. MoT sums, which sharpens the gate as prompts get longer."""
    weight_T1 = torch.ones_like(segment_ids_T) if prompt_T is None else prompt_T
    weight_T1 = weight_T1.float()[:, None]
    num = int(segment_ids_T[-1]) + 1
    sums_BD = torch.zeros(num, x_TD.shape[1], device=x_TD.device).index_add(0, segment_ids_T, x_TD.float() * weight_T1)
    counts_B1 = torch.zeros(num, 1, device=x_TD.device).index_add(0, segment_ids_T, weight_T1)
    return sums_BD / counts_B1.clamp_min(1)
