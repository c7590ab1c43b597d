"""Greedy answers of llama.cpp, in an environment with xllamacpp, which is llama.cpp built for Python.

    llama_answers.py BASE.gguf [ADAPTER.gguf]

A line {"ids": [...], "tokens": N} asks for the text of the N next tokens, up to its end.
"""

import json
import sys
from typing import Any

import xllamacpp

base, adapter = [*sys.argv[1:], ""][:2]
parameters = xllamacpp.CommonParams()
parameters.model.path = base
parameters.n_ctx, parameters.n_parallel, parameters.warmup = 1024, 1, False
parameters.cpuparams.n_threads = 1
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
if adapter:
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
server = xllamacpp.Server(parameters)
options: dict[str, Any] = {"temperature": 0.0, "top_k": 1, "cache_prompt": False}

for line in sys.stdin:
    question = json.loads(line)
    answer = server.handle_completions({"prompt": question["ids"], "n_predict": question["tokens"], **options})
    sys.stdout.write(json.dumps({"text": answer["choices"][0]["text"]}) + "\n")
    sys.stdout.flush()
