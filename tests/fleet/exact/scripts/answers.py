"""Greedy answers of transformers and PEFT: answers.py BACKBONE FOLDER...

A line {"regime": NAME or null, "ids": [...], "tokens": N} asks for the N next tokens, up to the end of the text.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

assert "streamlearn" not in sys.modules
backbone, *folders = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
model = PeftModel.from_pretrained(base, folders[0], adapter_name=Path(folders[0]).name)
for folder in folders[1:]:
    model.load_adapter(folder, adapter_name=Path(folder).name)
model.eval()
options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def answer(ids: list[int], tokens: int) -> list[int]:
    """The next tokens, without the one that ends the text."""
    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **options)
    ends = model.generation_config.eos_token_id
    return [int(each) for each in found[0, len(ids) :] if int(each) not in (ends if isinstance(ends, list) else [ends])]


for line in sys.stdin:
    question: dict[str, Any] = json.loads(line)
    if question["regime"] is None:
        with model.disable_adapter():
            new = answer(question["ids"], question["tokens"])
    else:
        model.set_adapter(question["regime"])
        new = answer(question["ids"], question["tokens"])
    sys.stdout.write(json.dumps({"ids": new}) + "\n")
    sys.stdout.flush()
