"""LoRAs as PEFT saves them, and the one that every regime begins from (`adapter.start`).

    y = W x + (alpha / N) B A x                 Hu et al. 2021 (arXiv 2106.09685), eq. 3                     (1)
    y = W x + s [s_0 / s B_0, B] [A_0; A] x     the sum of two, scaled by s_0 and s                          (2)
    W' = W + s_0 B_0 A_0                        merged                                                       (3)

The start is merged into the backbone's weights, eq. (3) in float32, when they are loaded. So "backbone" means backbone
with start from then on, and the start costs nothing in a step. What leaves for programs that load the backbone without
it has both, eq. (2).
"""
# Shape suffixes: D in features, O out features, N rank.

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from streamlearn.errors import ConfigError
from streamlearn.model_files import LORA_FILES, digest, find_start
from streamlearn.settings import AdapterSettings, BackboneSettings

CONFIG, WEIGHTS = LORA_FILES
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OPTIONS = re.compile(
    "peft_type|peft_version|auto_mapping|task_type|base_model_name_or_path|revision|inference_mode|r|lora_alpha|"
    "rank_pattern|alpha_pattern|use_rslora|target_modules|exclude_modules|layers_to_transform|layers_pattern|"
    "lora_dropout|init_lora_weights|eva_config|fan_in_fan_out|megatron_core|qalora_group_size|runtime_config|"
    "ensure_weight_tying"
)
"""Options of PEFT's `LoraConfig` that do not matter once the tensors are known, or that `read` applies."""
_INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the backbone's weights alone."""
_MERGE = "merge it with PEFT (merge_and_unload, save_pretrained) and name that folder in backbone.model"


@dataclass(frozen=True)
class LoraMatrices:
    """The matrices beside one linear, float32."""

    A_ND: Tensor
    B_ON: Tensor

    def zeros(self, rank: int) -> "LoraMatrices":
        """Matrices of this rank beside the same linear, without effect."""
        return LoraMatrices(self.A_ND.new_zeros(rank, self.A_ND.shape[1]), self.B_ON.new_zeros(len(self.B_ON), rank))


@dataclass(frozen=True)
class PlainLora:
    """A LoRA of one rank: eq. (1) in each of its layers."""

    layers: Mapping[str, LoraMatrices]
    """By the linear's name in the backbone, for example model.layers.0.mlp.up_proj."""
    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """Factor on B A x."""
        return self.alpha / self.rank

    def after(self, start: "PlainLora") -> "PlainLora":
        """Return the sum of both, eq. (2); its `B_ON` ends with the bits of this one's."""
        ratio, layers = start.scaling / self.scaling, dict[str, LoraMatrices]()
        for name in dict.fromkeys([*start.layers, *self.layers]):
            other = start.layers.get(name) or self.layers[name]
            first, last = start.layers.get(name, other.zeros(start.rank)), self.layers.get(name, other.zeros(self.rank))
            A_ND, B_ON = torch.cat([first.A_ND, last.A_ND]), torch.cat([ratio * first.B_ON, last.B_ON], 1)
            layers[name] = LoraMatrices(A_ND, B_ON)
        rank = start.rank + self.rank
        return PlainLora(layers, rank, self.scaling * rank)

    def without(self, start: "PlainLora") -> "PlainLora":
        """Return the one that `after` was called on."""
        own = {
            name: LoraMatrices(both.A_ND[start.rank :].contiguous(), both.B_ON[:, start.rank :].contiguous())
            for name, both in self.layers.items()
        }
        rank = self.rank - start.rank
        return PlainLora({name: last for name, last in own.items() if last.A_ND.any()}, rank, self.scaling * rank)


def from_tensors(tensors: Mapping[str, Tensor], scaling: Callable[[str, int], float]) -> PlainLora:
    """Build a LoRA from PEFT's tensors.

    Where ranks differ, A and B get zeros; where scalings differ, B gets the rest of its own.

    Args:
        tensors: By their names in `adapter_model.safetensors`.
        scaling: Factor on B A x, by the linear's name and rank.

    Raises:
        ValueError: there is none; or one is no matrix of a LoRA beside a linear, has no counterpart, or another shape.
    """
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or tensor.dim() != 2:
            raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} is no matrix of a LoRA beside a linear")
        pairs[match[1]][match[2]] = tensor.float()
    for name, pair in pairs.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {key: tuple(tensor.shape) for key, tensor in pair.items()}
            raise ValueError(f"{name} must have matrices A (rank, in) and B (out, rank), found {shapes}")
    if not pairs:
        raise ValueError(f"{WEIGHTS} must have the matrices of a LoRA, found none")
    scalings = {name: scaling(name, len(pair["A"])) for name, pair in pairs.items()}
    rank, common = max(len(pair["A"]) for pair in pairs.values()), next(iter(scalings.values()))

    def padded(name: str, A_ND: Tensor, B_ON: Tensor) -> LoraMatrices:
        missing, ratio = rank - len(A_ND), scalings[name] / common
        return LoraMatrices(F.pad(A_ND, (0, 0, 0, missing)), F.pad(ratio * B_ON, (0, missing)))

    return PlainLora({name: padded(name, pair["A"], pair["B"]) for name, pair in pairs.items()}, rank, common * rank)


def read(folder: Path) -> PlainLora:
    """Read a LoRA that PEFT saved: also rsLoRA, and with a rank or alpha of its own for some layers.

    Raises:
        ValueError: it is damaged, or of another form than eq. (1); says what was found.
        OSError: a file cannot be read.
    """
    config = orjson.loads((folder / CONFIG).read_bytes())
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ValueError(f"peft_type must be LORA, found {found}")
    others = [key for key, value in config.items() if not _OPTIONS.fullmatch(key) and value and value != "none"]
    if config.get("init_lora_weights") not in _INITIAL:
        others.append("init_lora_weights")
    if others:
        raise ValueError(
            f"{others[0]} must not be set, found {config[others[0]]!r:.80}: such an adapter is more than W x + B A x"
        )
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS} must be a safetensors file, found: {error}") from error
    patterns = config.get("alpha_pattern") or {}

    def scaling(name: str, rank: int) -> float:
        alpha: Any = patterns.get(get_pattern_key(patterns, name), config["lora_alpha"])
        return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)

    try:
        return from_tensors(tensors, scaling)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{CONFIG} must have a number lora_alpha, found: {error!r}") from error


@dataclass(frozen=True)
class StartLora:
    """The LoRA that every regime begins from."""

    name: str
    """`adapter.start`."""
    digest: str
    """SHA-256 of its files."""
    lora: PlainLora


def load_start(
    adapter: AdapterSettings, backbone: BackboneSettings, linears: Mapping[str, tuple[int, int]]
) -> StartLora | None:
    """Read `adapter.start`; None where it is not set.

    Args:
        adapter: The `adapter` section.
        backbone: The `backbone` section.
        linears: (In, out) features of every linear of the backbone that may have a LoRA, by name.

    Raises:
        ConfigError: see `find_start`; or it cannot be merged exactly: it is no plain LoRA, belongs to another backbone,
            or the backbone is quantized.
    """
    folder = find_start(adapter, download=True)
    if folder is None:
        return None
    name = f"adapter.start {adapter.start}"
    if backbone.quantization != "none":
        raise ConfigError(
            f"{name}: is merged into the backbone's weights, so they must not be quantized, found "
            f"backbone.quantization {backbone.quantization}; set it to none, or {_MERGE}"
        )
    try:
        lora = read(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: must be a LoRA of linear layers, found: {error}; choose another, or {_MERGE}"
        ) from error
    for linear, matrices in lora.layers.items():
        shape = (matrices.A_ND.shape[1], len(matrices.B_ON))
        if linears.get(linear) != shape:
            found = f"one of {linears[linear][0]} to {linears[linear][1]} features" if linear in linears else "none"
            raise ConfigError(
                f"{name}: needs a linear {linear} of {shape[0]} to {shape[1]} features in a layer of the backbone, "
                f"found {found}; choose a LoRA that was trained on {backbone.model}, or {_MERGE}"
            )
    return StartLora(str(adapter.start), digest(folder, files=LORA_FILES), lora)


@torch.no_grad()
def merge(model: Any, start: StartLora) -> None:
    """Compute eq. (3) in float32, and round it to the dtype of the weights.

    Raises:
        ConfigError: weights are quantized.
    """
    modules = dict(model.named_modules())
    for name, matrices in start.lora.layers.items():
        weight = modules[name].weight
        change_OD = start.lora.scaling * (matrices.B_ON @ matrices.A_ND)
        if not weight.is_floating_point() or weight.shape != change_OD.shape:
            raise ConfigError(
                f"adapter.start {start.name}: is merged into the backbone's weights, so they must not be quantized, "
                f"found {weight.dtype} of shape {tuple(weight.shape)} in {name}; load the model without, or {_MERGE}"
            )
        weight.data = (weight.float() + change_OD.to(weight.device)).to(weight.dtype)  # not in place: it may be a file
