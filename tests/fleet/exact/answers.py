"""Greedy answers of the daemon, vLLM, llama.cpp and transformers to the same prompts, and how often they agree.

vLLM and llama.cpp compute in float32, as the daemon does here, in another order. Two programs that round differently
choose another token where two are almost equally likely, without any adapter too. So each program's agreement with the
daemon is compared with its agreement with transformers on the bare backbone.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from transformers import AutoTokenizer

from tests.docs.place import free_port, started
from tests.fleet.exact.learned_run import LearnedRun
from tests.fleet.exact.stock_environment import stock_process
from tests.fleet.processes import BASE_MODEL, VLLM_ENVIRONMENT, Servers, is_up

TOKENS = 16
START_S = 900.0  # vLLM on a busy CPU
REQUEST_S = 600.0
IN_FLIGHT = 8


@dataclass(frozen=True)
class Asked:
    """A prompt, what answers it (an export, or None for the backbone), and the answer of the daemon or transformers."""

    prompt: str
    regime: str | None
    text: str


def of_daemon(run: LearnedRun, prompts: Sequence[str]) -> list[Asked]:
    """`POST /v1/completions`, which finds each prompt's regime itself."""
    answers = run.generate(prompts, TOKENS)
    return [Asked(prompt, regime, text) for prompt, (regime, text) in zip(prompts, answers, strict=True)]


def of_transformers(
    python: Path, backbone: str, run: LearnedRun, prompts: Sequence[tuple[str, str | None]]
) -> list[Asked]:
    """Stock transformers and PEFT, in an environment without streamlearn; each prompt with its regime."""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    exports = [str(run.peft / name) for name in run.regimes]
    found = []
    with stock_process(python, "answers.py", backbone, *exports) as stock:
        for prompt, regime in prompts:
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            new = stock.ask({"regime": regime, "ids": ids, "tokens": TOKENS})["ids"]
            found.append(Asked(prompt, regime, tokenizer.decode(new, skip_special_tokens=True)))
    return found


def agreement_of_vllm(servers: Servers, run: LearnedRun, asked: Sequence[Asked], log: Path) -> list[bool]:
    """Whether vLLM answers alike, with every export loaded."""
    with _vllm(servers, run, log) as url, httpx2.Client(base_url=url, timeout=REQUEST_S) as client:

        def is_alike(each: Asked) -> bool:
            body = {"model": each.regime or BASE_MODEL, "prompt": each.prompt, "max_tokens": TOKENS, "temperature": 0}
            answer = client.post("/v1/completions", json={**body, "add_special_tokens": False})
            answer.raise_for_status()
            return bool(answer.json()["choices"][0]["text"] == each.text)

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(is_alike, asked))


def agreement_of_llama(python: Path, base: Path, backbone: str, run: LearnedRun, asked: Sequence[Asked]) -> list[bool]:
    """Whether llama.cpp answers alike, with one export loaded at a time."""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    alike = dict[int, bool]()
    for regime in dict.fromkeys(each.regime for each in asked):
        adapter = [] if regime is None else [str(run.gguf / regime / "adapter.gguf")]
        with stock_process(python, "llama_answers.py", str(base), *adapter) as stock:
            for index, each in enumerate(asked):
                if each.regime == regime:
                    ids = tokenizer.encode(each.prompt, add_special_tokens=False)
                    alike[index] = stock.ask({"ids": ids, "tokens": TOKENS})["text"] == each.text
    return [alike[index] for index in range(len(asked))]


def share(alike: Sequence[bool]) -> dict[str, Any]:
    """Figures of an agreement."""
    return {"alike": sum(alike), "of": len(alike)}


@contextmanager
def _vllm(servers: Servers, run: LearnedRun, log: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    modules = [f"{name}={run.peft / name}" for name in run.regimes]
    command = [*servers.command(str(port)), "--lora-modules", *modules]
    with started(command, {**os.environ, **VLLM_ENVIRONMENT}, log) as process:
        deadline = time.monotonic() + START_S
        while not is_up(f"{url}/v1/models"):
            assert process.poll() is None, f"vLLM ended: see {log}"
            assert time.monotonic() < deadline, f"vLLM does not answer: see {log}"
            time.sleep(1.0)
        yield url
