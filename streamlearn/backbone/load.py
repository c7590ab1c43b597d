"""Check and load the frozen model; `outline` checks its architecture without reading weights."""

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from streamlearn.backbone import attention, nano_vl
from streamlearn.backbone.checks import find_plain_head, packing_obstacle
from streamlearn.backbone.lora import StartLora, load_start, merge
from streamlearn.backbone.quantization import check_installed, quantize
from streamlearn.backbone.vision import ProcessorVision, load_processor
from streamlearn.errors import ConfigError
from streamlearn.model_files import NANO, NANO_VL, digest, fetch
from streamlearn.settings import AdapterSettings, BackboneSettings
from streamlearn.shift.features import CHUNK, token_vectors


@dataclass(frozen=True)
class Arithmetic:
    """The dtype of the frozen weights and activations, and the reason for it.

    Where the CPU multiplies bfloat16 natively (AMX, AVX512-BF16), and on a GPU, it makes a step at least twice as fast.
    Where it is emulated, a product was measured 130 times slower than in float32. So `auto` tests the machine; the
    result is logged and recorded in the manifest.
    """

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


logging.set_verbosity_error()  # transformers prints advice about generation defaults
logging.disable_progress_bar()


@dataclass(frozen=True)
class Outline:
    """The architecture of a backbone, from its configuration; no weights are read."""

    folder: Path
    config: Any
    linears: Mapping[str, tuple[int, int]]
    """(In, out) features of every linear in the decoder, by name in the model."""
    tower_linears: Mapping[str, tuple[int, int]]
    """The same for vision tower and projector; empty for a text-only model."""
    start: StartLora | None = None
    """What `load` merges into the weights."""

    @property
    def is_vision(self) -> bool:
        """Whether the model reads images."""
        return bool(self.tower_linears)


@dataclass(frozen=True)
class Backbone:
    """A loaded, frozen language or image-text model, and its identity."""

    model: Any
    tokenizer: Any
    vision: ProcessorVision | None
    template: str | None
    """The processor's chat template; None: the tokenizer's."""
    arithmetic: Arithmetic
    device: torch.device
    identity: Mapping[str, str]
    """Model, revision, and the digest of its files; where there is a start, its name and digest."""
    token_vectors: NDArray[np.float16]
    """See `token_vectors`."""

    @property
    def vocab_size(self) -> int:
        """Number of embeddings; token ids are smaller."""
        return int(self.model.get_input_embeddings().weight.shape[0])


@dataclass(frozen=True)
class Preprocessing:
    """What of a backbone turns records into tokens; no weights."""

    tokenizer: Any
    vocab_size: int
    vision: ProcessorVision | None
    template: str | None
    """See `Backbone.template`."""


def outline(settings: BackboneSettings, adapter: AdapterSettings | None = None) -> Outline:
    """Fetch the model's files and read the architecture, and the LoRA that regimes begin from, if `adapter` has one.

    Raises:
        ConfigError: see `fetch` and `load_start`; or the folder has no causal language model that this transformers
            supports, or its attention cannot be packed; or `backbone.quantization` needs a package that is not
            installed.
    """
    check_installed(settings.quantization)
    folder = fetch(settings)
    try:
        config = _config(folder)
        skeleton = _skeleton(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"backbone.model {settings.model}: not a causal language model supported by the installed transformers: "
            f"{error}"
        ) from error
    if obstacle := _obstacle(config.get_text_config(), skeleton.get_decoder()):
        raise _not_packable(settings, obstacle)
    if _is_vision(config) and (kinds := _token_kinds(skeleton)):
        raise ConfigError(
            f"backbone.model {settings.model}: {config.model_type} computes an image's tokens in another way than "
            f"text, by {kinds}: for example, they attend to each other in both directions; choose a model in which all "
            "tokens are computed alike (LLaVA, Qwen3-VL, SmolVLM)"
        )
    decoder = skeleton.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    head = skeleton.get_output_embeddings()
    tower = nn.ModuleDict() if not _is_vision(config) else skeleton
    linears = _linears(skeleton, lambda module: id(module) in inside)
    tower_linears = _linears(tower, lambda module: id(module) not in inside and module is not head)
    start = None if adapter is None else load_start(adapter, settings, {**linears, **tower_linears})
    return Outline(folder, config, linears, tower_linears, start)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a model's decoder."""
    return next(module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList))


def _is_vision(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _skeleton(config: Any) -> Any:
    with torch.device("meta"):
        return _kind(config).from_config(config, trust_remote_code=False)


def _kind(config: Any) -> Any:
    return AutoModelForImageTextToText if _is_vision(config) else AutoModelForCausalLM


def _linears(model: nn.Module, included: Callable[[nn.Module], bool]) -> dict[str, tuple[int, int]]:
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and included(module)
    }


def _obstacle(config: Any, skeleton: Any) -> str | None:
    """Return the part of an architecture that `attention` does not compute, or that carries state between records."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"{', '.join(sorted(others))} in its layers"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention with logit soft-capping"
    if not (skeleton._supports_attention_backend and skeleton._supports_sdpa):  # no public name in transformers 5
        return "attention of its own kind (sinks, position biases, recurrent state)"
    if not any(isinstance(child, nn.ModuleList) for child in skeleton.children()):
        return "an encoder (as in BERT)"
    return None


def _token_kinds(skeleton: Any) -> str | None:
    """Return the argument that marks the image tokens for the layers of an image-text model; no pass here has one.

    Where positions are computed from it (`get_rope_index`), they are passed instead.
    """
    passed = {"mm_token_type_ids"} if hasattr(getattr(skeleton, "model", None), "get_rope_index") else set()
    names = (name for name in inspect.signature(skeleton.forward).parameters if name not in passed)
    return next((name for name in names if name.endswith("token_type_ids")), None)


def _not_packable(settings: BackboneSettings, obstacle: str) -> ConfigError:
    return ConfigError(
        f"backbone.model {settings.model}: {obstacle} cannot be packed; "
        "choose a model without it (Qwen3, Llama, Mistral, Gemma 1 and 3 have none)"
    )


def load(
    settings: BackboneSettings, shape: Outline, *, dtype: str | None = None, mesh: DeviceMesh | None = None
) -> Backbone:
    """Load weights and tokenizer and freeze everything.

    Args:
        settings: The `backbone` section.
        shape: What `outline` returned for it.
        dtype: Replaces `auto`: a resumed run computes in the dtype of its snapshot.
        mesh: The processes to divide it among; None: all of it is in this one.

    Raises:
        ConfigError: weights or tokenizer are missing, damaged, or of another architecture; no such device; or a packed
            pass does not compute what passes over single records do.
    """
    device = device_of(settings)
    arithmetic = choose(settings.dtype if dtype is None or settings.dtype != "auto" else dtype, device)  # type: ignore[arg-type]
    try:
        model, missing = _model(shape, arithmetic.dtype if settings.quantization == "none" else None)
        tokenizer, processor = _preprocessors(shape)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"backbone.model {settings.model}: cannot be loaded from {shape.folder}: {error}") from error
    if missing:  # transformers initializes them at random
        raise ConfigError(
            f"backbone.model {settings.model}: {shape.folder} has no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; copy the whole model again"
        )
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # without files transformers builds an empty one
        raise ConfigError(
            f"backbone.model {settings.model}: {shape.folder} has no tokenizer that can encode text; "
            "copy tokenizer.json into the folder"
        )
    model.requires_grad_(requires_grad=False)
    if shape.start is not None:
        merge(model, shape.start)
    if settings.quantization != "none":
        quantize(model, settings.quantization, arithmetic.dtype)  # before it moves: the device never holds all of it
    model.eval()
    vectors = _token_vectors(model)  # before they are divided
    if mesh is not None:
        from streamlearn.backbone.shard import shard  # noqa: PLC0415  only a divided backbone needs it

        _measure(settings, model)
        shard(model, mesh, is_vision=shape.is_vision)
    model.to(device)
    if mesh is None:
        _measure(settings, model)
    vision = None if processor is None else ProcessorVision(processor, model)
    template = getattr(processor, "chat_template", None)
    return Backbone(model, tokenizer, vision, template, arithmetic, device, identity(settings, shape), vectors)


def adopt(model: Any, tokenizer: Any, adapter: AdapterSettings) -> tuple[Outline, Backbone]:
    """Freeze a text model that is loaded already, merge the start, and let it attend as packed passes need it.

    Args:
        model: A causal language model of transformers, in bfloat16 or float32; changed in place.
        tokenizer: Its tokenizer.
        adapter: The `adapter` section.

    Raises:
        ConfigError: see `load_start`; it is no such model, reads images, its attention cannot be packed, or it computes
            in another dtype; or there is no tokenizer.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ConfigError(
            "model: must be a folder, a builtin model, a hub id or a causal language model of transformers, found "
            f"{type(model).__name__}"
        )
    if tokenizer is None:
        raise ConfigError("tokenizer: must be given with a model that is loaded already, found none")
    name = getattr(model, "name_or_path", "") or type(model).__name__
    settings = BackboneSettings.model_construct(model=name)
    if _is_vision(model.config):
        raise ConfigError(f"{name}: an image-text model needs its processor; pass the name of its folder instead")
    if model.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"{name}: must compute in bfloat16 or float32, found {model.dtype}; load it in one of them")
    if obstacle := _obstacle(model.config.get_text_config(), model.get_decoder()):
        raise _not_packable(settings, obstacle)
    inside = {id(module) for module in model.get_decoder().modules()}
    linears = _linears(model, lambda module: id(module) in inside)
    start = load_start(adapter, settings, linears)
    model.set_attn_implementation(attention.NAME)
    model.requires_grad_(requires_grad=False).eval()
    total = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        total.update(f"{key}\0{tensor.dtype}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    arithmetic = Arithmetic(model.dtype, "the dtype of the model that was passed")
    shape = Outline(Path(name), model.config, linears, {}, start)
    identity = {"model": name, "revision": "", "digest": total.hexdigest(), "passed": "true", **_start_identity(shape)}
    if start is not None:
        merge(model, start)
    _measure(settings, model)
    vectors = _token_vectors(model)
    backbone = Backbone(model, tokenizer, None, None, arithmetic, model.device, identity, vectors)
    return shape, backbone


def _token_vectors(model: Any) -> NDArray[np.float16]:
    rows = torch.split(model.get_input_embeddings().weight, CHUNK)
    return token_vectors(rows_VW.float().numpy(force=True) for rows_VW in rows)


def _measure(settings: BackboneSettings, model: Any) -> None:
    """Measure the properties in `checks`. Raises ConfigError if records cannot be packed."""
    if obstacle := packing_obstacle(model):
        raise _not_packable(settings, obstacle)
    find_plain_head(model)


def _config(folder: Path) -> Any:
    return nano_vl.config() if folder == NANO_VL else AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _model(shape: Outline, dtype: torch.dtype | None) -> tuple[Any, list[str]]:
    """Load the model in a dtype (None: the files'), and list the names of weights that are missing in the folder."""
    implementation: Any = {"text_config": attention.NAME, "": "sdpa"} if shape.is_vision else attention.NAME
    if shape.folder == NANO_VL:
        return nano_vl.assemble(dtype or torch.float32, attn_implementation=implementation), []
    model, report = _kind(shape.config).from_pretrained(
        shape.folder,
        dtype=dtype or "auto",
        attn_implementation=implementation,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    return model, sorted(report["missing_keys"])


def _preprocessors(shape: Outline) -> tuple[Any, Any]:
    """Load the tokenizer and, for an image-text model, the processor."""
    if shape.folder == NANO_VL:
        return nano_vl.tokenizer(), nano_vl.processor()
    return load_tokenizer(shape), load_processor(shape.folder, shape.config) if shape.is_vision else None


def load_preprocessing(settings: BackboneSettings, shape: Outline) -> Preprocessing:
    """Load tokenizer and processor without the weights.

    Args:
        settings: The `backbone` section.
        shape: What `outline` returned for it.

    Raises:
        ConfigError: they are missing or damaged.
    """
    skeleton = _skeleton(shape.config)
    try:
        tokenizer, processor = _preprocessors(shape)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"backbone.model {settings.model}: cannot be loaded from {shape.folder}: {error}") from error
    vision = None if processor is None else ProcessorVision(processor, skeleton)
    vocab_size = int(skeleton.get_input_embeddings().weight.shape[0])
    return Preprocessing(tokenizer, vocab_size, vision, getattr(processor, "chat_template", None))


def load_tokenizer(shape: Outline) -> Any:
    """Load the tokenizer of a model in a folder, without the model.

    Raises:
        OSError or ValueError: its files are missing or damaged.
    """
    return AutoTokenizer.from_pretrained(shape.folder, trust_remote_code=False, local_files_only=True)


def identity(settings: BackboneSettings, shape: Outline) -> dict[str, str]:
    """Return the identity that a snapshot records, see `Backbone.identity`."""
    folders = (shape.folder, NANO) if shape.folder == NANO_VL else (shape.folder,)
    own = {"model": settings.model, "revision": settings.revision or "", "digest": digest(*folders)}
    return own | _start_identity(shape)


def _start_identity(shape: Outline) -> dict[str, str]:
    return {} if shape.start is None else {"start": shape.start.name, "start_digest": shape.start.digest}


def device_of(settings: BackboneSettings) -> torch.device:
    """Return the configured device; `auto` is the GPU if there is one.

    Raises:
        ConfigError: this machine has no such device.
    """
    name = settings.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"backbone.device {name}: not usable on this machine: {error}") from error
    return device
