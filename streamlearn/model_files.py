"""The files of a frozen model: where they are, their digest, and the token embeddings in them. Needs no torch.

`builtin:nano` and `builtin:nano-vl` ship with the package; any other name is a local folder, or a hub id at a pinned
revision. Weights must be safetensors; code from a model's repository is never run.
"""
# Shape suffixes: V vocabulary, W width of a backbone.

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from streamlearn.errors import ConfigError
from streamlearn.settings import AdapterSettings, BackboneSettings

NANO = Path(__file__).parent / "backbone" / "nano"
NANO_VL = Path(__file__).parent / "backbone" / "nano-vl"
BUILTIN = {"builtin:nano": NANO, "builtin:nano-vl": NANO_VL}
_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")
LORA_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a LoRA that PEFT saved: its options, and its weights."""
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$")
"""Name of the token embeddings in the architectures that transformers has."""
_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
"""Dtype in a safetensors file -> how it is read."""


def locate(settings: BackboneSettings) -> Path | None:
    """Check `backbone.model` and `backbone.revision` and find the model's folder, without network access.

    `fetch` makes the same checks.

    Returns:
        The folder; None for a valid hub id whose files are not all on this machine, which `fetch` would download.

    Raises:
        ConfigError: no such builtin model or folder, no safetensors, not a hub id, or a hub id without pinned commit.
    """
    return _local_folder(settings) or _hub_folder("backbone.model", settings.model, settings.revision, download=False)


def fetch(settings: BackboneSettings) -> Path:
    """Return the model's folder; download what is missing of a hub model.

    Raises:
        ConfigError: see `locate`; or the download failed.
    """
    folder = _local_folder(settings) or _hub_folder("backbone.model", settings.model, settings.revision, download=True)
    assert folder is not None, "a download that fails is an error"
    return folder


def find_start(settings: AdapterSettings, *, download: bool) -> Path | None:
    """Return the folder of the LoRA `adapter.start`; None if there is none, or without `download` not on this machine.

    Raises:
        ConfigError: no such folder, not a hub id, or one without a pinned commit; the folder is no LoRA that PEFT
            saved; or the download failed.
    """
    if settings.start is None:
        return None
    folder: Path | None = Path(settings.start).expanduser()
    assert folder is not None
    if not folder.is_dir():
        _check_pinned("adapter.start", settings.start, "adapter.start_revision", settings.start_revision)
        folder = _hub_folder("adapter.start", settings.start, settings.start_revision, LORA_FILES, download=download)
    if folder is not None and (missing := [name for name in LORA_FILES if not (folder / name).is_file()]):
        raise ConfigError(
            f"adapter.start {settings.start}: must have {' and '.join(LORA_FILES)}, found no {missing[0]}; save the "
            "LoRA with save_pretrained"
        )
    return folder


def pinned(model: str, revision: str | None = None) -> str | None:
    """Return the commit of a hub id, `revision` or else the newest; None for a builtin model or a folder.

    Raises:
        ConfigError: the name is no hub id, or the hub cannot be asked.
    """
    if model.startswith("builtin:") or Path(model).expanduser().is_dir():
        return None
    return revision or _newest_revision(model)


def _newest_revision(model: str) -> str:
    """Return the commit of a hub id's branch `main`: of the copy on this machine, or else as the hub knows it.

    Raises:
        ConfigError: the name is no hub id, or the hub cannot be asked.
    """
    if not is_hub_id(model):
        raise ConfigError(f"{model}: must be a folder, a builtin model or a hub id of the form owner/name, found none")
    if copy := _hub_folder("", model, "main", download=False):
        return copy.name
    from httpx2 import HTTPError  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub import model_info  # noqa: PLC0415

    try:
        return str(model_info(model).sha)
    except (HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model}: its newest commit cannot be read from the hub: {reason}; set revision") from error


def text_folder(folder: Path) -> Path:
    """Return the folder of a model's tokenizer and token embeddings: nano-vl has those of nano."""
    return NANO if folder == NANO_VL else folder


def digest(*folders: Path, files: Sequence[str] = _FILES) -> str:
    """Compute SHA-256, in hex, over name and content of every file that determines what the model computes."""
    total = hashlib.sha256()
    for folder in folders:
        for file in sorted({file for pattern in files for file in folder.glob(pattern)}):
            with file.open("rb") as content:
                total.update(f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def load_tokenizer(folder: Path) -> Any:
    """Load a fast tokenizer that `save_pretrained` wrote.

    AutoTokenizer would look it up by the model's type and import torch; `tokenizer.json` holds the whole tokenizer.

    Raises:
        OSError or ValueError: its files are missing or damaged.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def embedding_rows(folder: Path, size: int) -> Iterator[NDArray[np.float32]]:
    """Read a model's token embeddings, (V, W): `size` rows at a time, in order.

    Raises:
        ConfigError: the folder has none that are recognized, or in another dtype than bfloat16, float16 or float32, or
            a file is damaged.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                name = next((name for name in tensors.keys() if _EMBEDDINGS.search(name)), None)  # noqa: SIM118  no dict
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: expected a safetensors file, found: {error}") from error
        if name is not None:
            yield from _rows(file, name, size)
            return
    raise ConfigError(
        f"{folder}: expected token embeddings in its *.safetensors (a name that matches {_EMBEDDINGS.pattern}), found "
        "none"
    )


def _rows(file: Path, name: str, size: int) -> Iterator[NDArray[np.float32]]:
    """Rows of a tensor. safetensors itself does not give a bfloat16 tensor to NumPy."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        tensor = orjson.loads(content.read(length))[name]
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise ConfigError(f"{file}: {name} must be {', '.join(_DTYPES)}, found {tensor['dtype']}")
        num_rows, width = tensor["shape"]
        content.seek(8 + length + tensor["data_offsets"][0])
        for start in range(0, num_rows, size):
            count = min(size, num_rows - start)
            rows_VW = np.fromfile(content, dtype, count * width).reshape(count, width)
            if tensor["dtype"] == "BF16":  # the upper half of a float32
                rows_VW = (rows_VW.astype(np.uint32) << 16).view(np.float32)
            yield rows_VW.astype(np.float32, copy=False)


def _local_folder(settings: BackboneSettings) -> Path | None:
    """Return the folder of a builtin or local model; None for a hub id at a pinned commit."""
    name = settings.model
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise ConfigError(f"backbone.model {name}: no such model; builtin models are {', '.join(BUILTIN)}")
        return BUILTIN[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not list(folder.glob("*.safetensors")):
            raise ConfigError(
                f"backbone.model {name}: the folder has no *.safetensors; convert the weights with save_pretrained"
            )
        return folder
    advice = (
        "; in a checkout, `python -m benchmarks.backbones.smollm2 FOLDER` makes the folder of SmolLM2-135M-Instruct"
    )
    _check_pinned("backbone.model", name, "backbone.revision", settings.revision, advice)
    return None


def _check_pinned(key: str, name: str, revision_key: str, revision: str | None, advice: str = "") -> None:
    if not is_hub_id(name):
        raise ConfigError(f"{key} {name}: no such folder, and not a hub id of the form owner/name{advice}")
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ConfigError(
            f"{revision_key}: a hub id needs a pinned commit of 40 hex digits, found {revision!r}; "
            "copy it from the list of commits on the model's page"
        )


def is_hub_id(name: str) -> bool:
    """Whether the hub accepts a name of the form owner/name."""
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _hub_folder(
    key: str, model: str, revision: str | None, files: Sequence[str] = _FILES, *, download: bool
) -> Path | None:
    """Return the folder of a hub model in the hub's cache; without `download`, None unless all files are there."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a hub id needs the client
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(files), local_files_only=not download)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if not download:
            return None
        raise ConfigError(f"{key} {model} at {revision}: cannot be downloaded from the hub: {error}") from error
