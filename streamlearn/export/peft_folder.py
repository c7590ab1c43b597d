"""A plain LoRA as a folder that stock PEFT loads."""

from pathlib import Path

import orjson
import torch
from peft import LoraConfig, TaskType
from safetensors.torch import save_file

from streamlearn.export.exported_regime import BaseModel
from streamlearn.export.plain_lora import PlainLora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write(folder: Path, lora: PlainLora, base: BaseModel) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, in float32, into an existing folder."""
    tensors: dict[str, torch.Tensor] = {}
    for name, matrices in lora.layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = matrices.A_ND
        tensors[f"base_model.model.{name}.lora_B.weight"] = matrices.B_ON
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


def _sort_modules(file: Path) -> None:
    """PEFT writes the target modules in the order of a set, which differs from one process to the next."""
    config = orjson.loads(file.read_bytes())
    config["target_modules"].sort()
    file.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
