"""A plain LoRA as a folder that stock PEFT loads, and back."""

from pathlib import Path

import orjson
import torch
from peft import LoraConfig, TaskType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from streamlearn.errors import PublicationError
from streamlearn.export.exported_regime import BaseModel
from streamlearn.export.plain_lora import LoraMatrices, PlainLora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write(folder: Path, lora: PlainLora, base: BaseModel) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, in float32, into an existing folder."""
    tensors: dict[str, torch.Tensor] = {}
    for name, matrices in lora.layers.items():
        tensors[f"{_PREFIX}{name}{_A}"] = matrices.A_ND
        tensors[f"{_PREFIX}{name}{_B}"] = matrices.B_ON
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        target_modules=list(lora.layers),  # full names: a last part may match layers without an adapter too
        lora_dropout=0.0,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base.name,
        revision=base.revision,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    _sort_modules(folder / CONFIG)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read(folder: Path) -> PlainLora:
    """Read what `write` wrote.

    Raises:
        PublicationError: a file is missing or damaged.
    """
    try:
        config = orjson.loads((folder / CONFIG).read_bytes())
        tensors = load_file(folder / WEIGHTS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        names = [name.removeprefix(_PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A)]
        layers = {
            name: LoraMatrices(tensors[f"{_PREFIX}{name}{_A}"], tensors[f"{_PREFIX}{name}{_B}"]) for name in names
        }
    except (OSError, SafetensorError, orjson.JSONDecodeError, KeyError, ValueError) as error:
        raise PublicationError(f"{folder}: expected a LoRA in PEFT's form, found: {error!r:.200}") from error
    return PlainLora(layers, rank, alpha)


def _sort_modules(file: Path) -> None:
    """PEFT writes the target modules in the order of a set, which differs from one process to the next."""
    config = orjson.loads(file.read_bytes())
    config["target_modules"].sort()
    file.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
