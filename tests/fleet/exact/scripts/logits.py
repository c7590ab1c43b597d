"""Logits of transformers and PEFT, compared with those in a file: logits.py BACKBONE DTYPE ATTENTION FOLDER...

A line {"regime": NAME, "file": FILE} on standard input asks for a comparison of the tensors `expected.I` in FILE with
the logits for `ids.I` under the export of that name; {"regime": null, ...} is the untouched backbone.
"""
# Shape suffixes: T tokens, V vocabulary.

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

assert "streamlearn" not in sys.modules
backbone, dtype, attention, *folders = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(backbone, dtype=getattr(torch, dtype), attn_implementation=attention)
model = PeftModel.from_pretrained(base, folders[0], adapter_name=Path(folders[0]).name, autocast_adapter_dtype=False)
for folder in folders[1:]:
    model.load_adapter(folder, adapter_name=Path(folder).name, autocast_adapter_dtype=False)
model.to(getattr(torch, dtype)).eval()


def logits_of(ids_T: torch.Tensor, regime: str | None) -> torch.Tensor:
    """Of every position, (T, V)."""
    with torch.no_grad(), model.disable_adapter() if regime is None else nullcontext():
        if regime is not None:
            model.set_adapter(regime)
        logits_TV: torch.Tensor = model(input_ids=ids_T[None], use_cache=False).logits[0]
        return logits_TV


def compared(tensors: dict[str, torch.Tensor], regime: str | None) -> dict[str, Any]:
    """The largest differences of all prompts in a file."""
    answer: dict[str, Any] = {"difference": 0.0, "largest": 0.0, "relative": 0.0, "positions": 0}
    for name in [name for name in tensors if name.startswith("ids.")]:
        expected_TV = tensors[name.replace("ids.", "expected.")]
        difference_T = (logits_of(tensors[name], regime) - expected_TV).abs().amax(-1)
        largest_T = expected_TV.abs().amax(-1)
        answer["difference"] = max(answer["difference"], float(difference_T.max()))
        answer["largest"] = max(answer["largest"], float(largest_T.max()))
        answer["relative"] = max(answer["relative"], float((difference_T / largest_T).max()))
        answer["positions"] += len(difference_T)
    return answer


for line in sys.stdin:
    question: dict[str, Any] = json.loads(line)
    sys.stdout.write(json.dumps(compared(load_file(question["file"]), question["regime"])) + "\n")
    sys.stdout.flush()
