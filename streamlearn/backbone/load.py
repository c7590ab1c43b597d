"""Find, check and load the frozen model.

`builtin:nano` and `builtin:nano-vl` ship with the package; anything else is a local folder or a hub id at a pinned
revision. Weights are safetensors, code is never taken from a model's repository. Everything that the configuration
alone can tell (does the architecture fit, which linears are there) is told by `outline` before any weight is read.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

from streamlearn.backbone import attention, nano_vl
from streamlearn.backbone.arithmetic import Arithmetic, choose
from streamlearn.backbone.vision import ProcessorVision, load_processor
from streamlearn.errors import ConfigError
from streamlearn.settings import BackboneSettings

logging.set_verbosity_error()  # transformers prints advice about generation defaults that nobody asked for
logging.disable_progress_bar()

BUILTIN = {"builtin:nano": nano_vl.NANO, "builtin:nano-vl": nano_vl.FOLDER}
_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")


@dataclass(frozen=True)
class Outline:
    """What a backbone is, known from its configuration alone."""

    folder: Path
    config: Any
    linears: Mapping[str, tuple[int, int]]
    """Dotted name of every linear inside the decoder, with its (in, out) sizes."""
    tower_linears: Mapping[str, tuple[int, int]]
    """The same of what turns images into tokens: vision tower and projector; empty for a model of text."""

    @property
    def is_vision(self) -> bool:
        """Whether it reads images."""
        return bool(self.tower_linears)


@dataclass(frozen=True)
class Backbone:
    """A loaded, frozen language model, with or without eyes, and what identifies it."""

    model: Any
    tokenizer: Any
    vision: ProcessorVision | None
    template: str | None
    """The chat template where it is not the tokenizer's own."""
    arithmetic: Arithmetic
    device: torch.device
    identity: Mapping[str, str]
    """See `identity`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the bound on token ids."""
        return int(self.model.get_input_embeddings().weight.shape[0])


def outline(settings: BackboneSettings) -> Outline:
    """Resolve the folder and read the architecture.

    Raises:
        ConfigError: no such model, no pinned revision, no safetensors, or an attention that cannot be packed.
    """
    folder = _folder(settings)
    try:
        config = _config(folder)
        with torch.device("meta"):
            skeleton = _kind(config).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"backbone.model {settings.model}: not a causal language model that this transformers knows: {error}"
        ) from error
    if obstacle := _obstacle(config.get_text_config(), skeleton.get_decoder()):
        raise ConfigError(
            f"backbone.model {settings.model}: {obstacle} cannot be packed; "
            "choose a model without it (Qwen3, Llama, Mistral, Gemma 1 and 3 have none)"
        )
    decoder = skeleton.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    head = skeleton.get_output_embeddings()
    tower = nn.ModuleDict() if not _is_vision(config) else skeleton
    return Outline(
        folder=folder,
        config=config,
        linears=_linears(decoder, lambda _: True),
        tower_linears=_linears(tower, lambda module: id(module) not in inside and module is not head),
    )


def _is_vision(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _kind(config: Any) -> Any:
    """The class that builds the model."""
    return AutoModelForImageTextToText if _is_vision(config) else AutoModelForCausalLM


def _linears(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, tuple[int, int]]:
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and wanted(module)
    }


def _obstacle(config: Any, skeleton: Any) -> str | None:
    """What of an architecture would be left out by `attention`, or carry one record's state into the next."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"{', '.join(sorted(others))} in its layers"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention with logit soft-capping"
    if not (skeleton._supports_attention_backend and skeleton._supports_sdpa):  # no public name in transformers 5
        return "attention of its own kind (sinks, position biases, recurrent state)"
    return None


def load(settings: BackboneSettings, shape: Outline, *, dtype: str | None = None) -> Backbone:
    """Load weights and tokenizer and freeze everything; `dtype` overrides `auto` on a resume, so that bits repeat.

    Raises:
        ConfigError: weights or tokenizer are absent, damaged, or of another architecture.
    """
    device = device_of(settings)
    arithmetic = choose(settings.dtype if dtype is None or settings.dtype != "auto" else dtype, device)  # type: ignore[arg-type]
    try:
        model, missing = _model(shape, arithmetic.dtype)
        tokenizer, processor = _readers(shape)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"backbone.model {settings.model}: cannot be loaded from {shape.folder}: {error}") from error
    if missing:  # transformers would train on with random numbers in their place
        raise ConfigError(
            f"backbone.model {settings.model}: {shape.folder} holds no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; copy the whole model again"
        )
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers makes an empty one where files lack
        raise ConfigError(
            f"backbone.model {settings.model}: {shape.folder} holds no tokenizer that can encode text; "
            "copy tokenizer.json beside the weights"
        )
    model.requires_grad_(requires_grad=False)
    model.to(device).eval()
    vision = None if processor is None else ProcessorVision(processor, model)
    template = getattr(processor, "chat_template", None)
    return Backbone(model, tokenizer, vision, template, arithmetic, device, identity(settings, shape))


def _config(folder: Path) -> Any:
    return nano_vl.config() if folder == nano_vl.FOLDER else AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _model(shape: Outline, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model, and the names of weights that the folder lacks."""
    implementation: Any = {"text_config": attention.NAME, "": "sdpa"} if shape.is_vision else attention.NAME
    if shape.folder == nano_vl.FOLDER:
        return nano_vl.assemble(dtype, attn_implementation=implementation), []
    model, report = _kind(shape.config).from_pretrained(
        shape.folder,
        dtype=dtype,
        attn_implementation=implementation,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    return model, sorted(report["missing_keys"])


def _readers(shape: Outline) -> tuple[Any, Any]:
    """Tokenizer, and processor of images where the model reads any."""
    if shape.folder == nano_vl.FOLDER:
        return nano_vl.tokenizer(), nano_vl.processor()
    tokenizer = AutoTokenizer.from_pretrained(shape.folder, trust_remote_code=False, local_files_only=True)
    return tokenizer, load_processor(shape.folder, shape.config) if shape.is_vision else None


def identity(settings: BackboneSettings, shape: Outline) -> dict[str, str]:
    """What a snapshot remembers of its backbone: model, revision, and the digest of its files."""
    folders = (shape.folder, nano_vl.NANO) if shape.folder == nano_vl.FOLDER else (shape.folder,)
    return {"model": settings.model, "revision": settings.revision or "", "digest": digest(*folders)}


def digest(*folders: Path) -> str:
    """SHA-256 over name and content of every file that decides what the model computes, hex."""
    total = hashlib.sha256()
    for file in [file for folder in folders for file in sorted({f for each in _FILES for f in folder.glob(each)})]:
        with file.open("rb") as content:
            total.update(f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _folder(settings: BackboneSettings) -> Path:
    name = settings.model
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise ConfigError(f"backbone.model {name}: unknown, builtin models are {', '.join(BUILTIN)}")
        return BUILTIN[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not list(folder.glob("*.safetensors")):
            raise ConfigError(
                f"backbone.model {name}: holds no *.safetensors; convert the weights with save_pretrained"
            )
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise ConfigError(f"backbone.model {name}: no such folder, and not a hub id of the form owner/name")
    if not re.fullmatch(r"[0-9a-f]{40}", settings.revision or ""):
        raise ConfigError(
            f"backbone.revision: a hub id needs a pinned commit of 40 hex digits, found {settings.revision!r}; "
            f"take it from the model's list of commits"
        )
    return _download(name, settings.revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(f"backbone.model {name} at {revision}: cannot be had from the hub: {error}") from error


def would_be_fetched(settings: BackboneSettings) -> bool:
    """Whether the model is on the hub and not, or not whole, on this machine; asks nobody."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    name = settings.model
    if name.startswith("builtin:") or Path(name).expanduser().is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return False
    try:
        snapshot_download(name, revision=settings.revision, allow_patterns=list(_FILES), local_files_only=True)
    except LocalEntryNotFoundError:
        return True
    return False


def locate(settings: BackboneSettings) -> Path | None:
    """Return the model's folder, or None for a pinned hub id that is not on this machine. Uses no network.

    Raises:
        ConfigError: no such model, no pinned revision, or no safetensors.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    name, revision = settings.model, settings.revision or ""
    is_local = name.startswith("builtin:") or Path(name).expanduser().is_dir()
    if is_local or not (re.fullmatch(r"[\w.-]+/[\w.-]+", name) and re.fullmatch(r"[0-9a-f]{40}", revision)):
        return _folder(settings)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def device_of(settings: BackboneSettings) -> torch.device:
    """Where the model will be.

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
