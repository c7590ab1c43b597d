"""Locating, checking and loading the frozen model, and its dtype."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.backbones.pretrain import train_tokenizer
from streamlearn.backbone import load as arithmetic
from streamlearn.backbone.attention import Records
from streamlearn.backbone.load import (
    Backbone,
    choose,
    load,
    outline,
)
from streamlearn.errors import ConfigError
from streamlearn.model_files import digest, embedding_rows, locate
from streamlearn.settings import BackboneSettings
from streamlearn.shift.features import NUM_FEATURES, token_vectors
from tests.backbone.conftest import Folders
from tests.doubles import SENTENCES, VOCAB_SIZE, tiny_backbone

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

OWN = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

"""Sizes that only one architecture has."""

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(folder_of: Folders, tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(folder_of("qwen3"), tmp_path / "model"))


def settings_for(folder: Path | str, **rest: Any) -> BackboneSettings:
    return BackboneSettings(model=str(folder), **{"dtype": "float32", "device": "cpu", **rest})


def load_from(folder: Path, **rest: Any) -> Backbone:
    settings = settings_for(folder, **rest)
    return load(settings, outline(settings))


def refusal(settings: BackboneSettings) -> str:
    """The message of `outline`."""
    with pytest.raises(ConfigError) as caught:
        outline(settings)
    return str(caught.value)


def refusals(settings: BackboneSettings) -> set[str]:
    """The messages of everything that checks the settings."""
    found = set()
    for check in (locate, outline):
        with pytest.raises(ConfigError) as caught:
            check(settings)
        found.add(str(caught.value))
    return found


def forbid_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise AssertionError("no network access expected")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def config_alone(folder: Path, architecture: str) -> Path:
    """A model folder with a configuration and an empty file of weights."""
    AutoConfig.for_model(architecture).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def random_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """A tiny random model of any architecture with a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(architecture, **SIZES | OWN.get(architecture, {}) | changes)
        )
    model.save_pretrained(folder)
    train_tokenizer(list(SENTENCES) * 4, VOCAB_SIZE).save_pretrained(folder)
    return folder


def test_everything_is_frozen(folder: Path) -> None:
    """No parameter requires a gradient, no module is in training mode, and the dtype is the configured one."""
    backbone = load_from(folder)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert not any(module.training for module in backbone.model.modules())
    assert {parameter.dtype for parameter in backbone.model.parameters()} == {torch.float32}
    assert backbone.vocab_size == VOCAB_SIZE
    assert backbone.tokenizer("hello").input_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_token_vectors_are_those_of_the_embeddings_in_the_files(folder: Path, dtype: torch.dtype) -> None:
    """One for each row of the model's token table, as it was before anything was divided or quantized."""
    tiny_backbone(folder, dtype=dtype)
    backbone = load_from(folder)
    assert backbone.token_vectors.shape == (backbone.vocab_size, NUM_FEATURES)
    np.testing.assert_allclose(np.linalg.norm(backbone.token_vectors.astype(np.float32), axis=1), 1.0, atol=2e-3)
    assert np.array_equal(backbone.token_vectors, token_vectors(embedding_rows(folder, 8192)))


def test_embeddings_that_cannot_be_read_are_refused(folder: Path) -> None:
    """Another name, another dtype, a damaged file: the message says which."""
    file = folder / "model.safetensors"
    save_file({"model.unlike.weight": torch.ones(4, 4)}, file)
    with pytest.raises(ConfigError, match="expected token embeddings in its"):
        list(embedding_rows(folder, 2))
    save_file({"model.embed_tokens.weight": torch.ones(4, 4, dtype=torch.int8)}, file)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight must be BF16, F16, F32, found I8"):
        list(embedding_rows(folder, 2))
    file.write_bytes(b"unreadable")
    with pytest.raises(ConfigError, match="expected a safetensors file"):
        list(embedding_rows(folder, 2))


def test_an_outline_needs_no_weights(folder: Path) -> None:
    """Names and sizes of the decoder's linears, without the head, are read although the weights are unreadable."""
    (folder / "model.safetensors").write_bytes(b"unreadable")
    shape = outline(settings_for(folder))
    mlp = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    attention = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    expected = {f"layers.{i}.mlp.{name}": sizes for i in range(2) for name, sizes in mlp.items()}
    expected |= {f"layers.{i}.self_attn.{name}": sizes for i in range(2) for name, sizes in attention.items()}
    assert shape.linears == expected


def test_an_unknown_builtin_is_refused() -> None:
    """The message lists the builtin models."""
    assert refusals(settings_for("builtin:giant")) == {
        "backbone.model builtin:giant: no such model; builtin models are builtin:nano, builtin:nano-vl"
    }


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "owner/a--b"])
def test_a_missing_folder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is neither a folder nor a hub id is not requested from the hub."""
    forbid_download(monkeypatch)
    assert refusals(settings_for(name, revision=REVISION)) == {
        f"backbone.model {name}: no such folder, and not a hub id of the form owner/name; "
        "in a checkout, `python -m benchmarks.backbones.smollm2 FOLDER` makes the folder of SmolLM2-135M-Instruct"
    }


@pytest.mark.parametrize("revision", [None, REVISION[:-1]])
def test_a_hub_id_needs_a_pinned_commit(revision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch can move, so a full commit is required, before anything is requested from the hub."""
    forbid_download(monkeypatch)
    (message,) = refusals(settings_for("owner/name", revision=revision))
    assert message.startswith(f"backbone.revision: a hub id needs a pinned commit of 40 hex digits, found {revision!r}")


def test_the_hubs_own_cache_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real client: absent from the cache, then present."""
    cache = tmp_path / "cache"
    download = partial(huggingface_hub.snapshot_download, cache_dir=cache)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = settings_for("owner/name", revision=REVISION)
    assert locate(settings) is None
    snapshot = cache / "models--owner--name" / "snapshots" / REVISION
    shutil.copytree(folder, snapshot)
    assert locate(settings) == snapshot


def test_a_hub_model_is_downloaded_at_its_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned commit is requested, without code, and its files are the model."""
    requested: list[tuple[str, str]] = []

    def download(name: str, *, revision: str, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        assert not any("py" in pattern for pattern in allow_patterns)
        requested.append((name, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    backbone = load_from(Path("owner/name"), revision=REVISION)
    assert requested == [("owner/name", REVISION)]
    assert backbone.identity == {"model": "owner/name", "revision": REVISION, "digest": digest(folder)}


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    """Pickled weights are not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusals(settings_for(folder)) == {
        f"backbone.model {folder}: the folder has no *.safetensors; convert the weights with save_pretrained"
    }


def test_code_from_a_models_folder_is_not_run(folder: Path) -> None:
    """A folder with code for an unknown architecture is refused and the code is not run."""
    code = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    change_config(folder, auto_map=code, model_type="evil")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert "not a causal language model" in refusal(settings_for(folder))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"attn_logit_softcapping": 50.0}, "attention with logit soft-capping"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention in its layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention in its layers"),
    ],
)
def test_an_attention_that_cannot_be_packed_is_refused(folder: Path, changes: dict[str, Any], obstacle: str) -> None:
    """Soft-capping and layers with state or chunks would be computed incorrectly, so the model is not loaded."""
    change_config(folder, **changes)
    assert refusal(settings_for(folder)).startswith(f"backbone.model {folder}: {obstacle} cannot be packed; ")


@pytest.mark.parametrize("architecture", ["bloom", "gpt_oss"])
def test_an_architecture_that_ignores_the_packing_is_refused(architecture: str, tmp_path: Path) -> None:
    """Position biases and attention sinks are not part of the packed attention."""
    folder = config_alone(tmp_path, architecture)
    assert "attention of its own kind (sinks, position biases, recurrent state) cannot be packed" in refusal(
        settings_for(folder)
    )


@pytest.mark.parametrize(
    ("architecture", "obstacle"),
    [
        ("nemotron", "attention that reaches from one record of a batch into another"),
        ("doge", "attention with a mask of its own"),
    ],
)
def test_an_architecture_that_loses_the_packing_is_refused(architecture: str, obstacle: str, tmp_path: Path) -> None:
    """Its configuration says nothing: this is measured when it is loaded."""
    folder = random_model(tmp_path, architecture)
    settings = settings_for(folder)
    shape = outline(settings)
    with pytest.raises(ConfigError) as caught:
        load(settings, shape)
    assert str(caught.value).startswith(f"backbone.model {folder}: {obstacle} cannot be packed; ")


@pytest.mark.parametrize(("architecture", "dtype"), [("jetmoe", "float32"), ("mixtral", "bfloat16")])
def test_an_architecture_that_keeps_the_packing_is_accepted(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Also one with another layout of heads, or with a choice among experts."""
    assert load_from(random_model(tmp_path, architecture), dtype=dtype).arithmetic.name == dtype


@torch.no_grad()
def test_latent_attention_in_bfloat16_is_that_of_float32(tmp_path: Path) -> None:
    """Its values have another head size than its queries; a packed batch differs by what bfloat16 rounds."""
    folder = random_model(tmp_path, "deepseek_v3", first_k_dense_replace=2)  # no experts, whose choice rounding changes
    ids, positions = torch.arange(40, 53)[None], torch.tensor([[*range(6), *range(7)]])
    wide, narrow = (
        load_from(folder, dtype=dtype)
        .model(input_ids=ids, position_ids=positions, records=Records([6, 7]), use_cache=False)
        .logits.float()
        for dtype in ("float32", "bfloat16")
    )
    assert (narrow - wide).norm() / wide.norm() < 0.02


@pytest.mark.parametrize(
    ("architecture", "argument"),
    [("gemma3", "token_type_ids"), ("paligemma", "token_type_ids"), ("ernie4_5_vl_moe", "moe_mm_token_type_ids")],
)
def test_images_that_are_computed_in_another_way_than_text_are_refused(
    architecture: str, argument: str, tmp_path: Path
) -> None:
    """Gemma 3 and PaliGemma attend to an image's tokens in both directions, Ernie has experts of their own for them."""
    folder = config_alone(tmp_path, architecture)
    message = refusal(settings_for(folder))
    assert message.startswith(f"backbone.model {folder}: {architecture} computes an image's tokens in another way")
    assert f"by {argument}:" in message


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """Transformers lists BERT among the causal language models, although its attention is not causal by default."""
    folder = config_alone(tmp_path, "bert")
    assert "an encoder (as in BERT) cannot be packed" in refusal(settings_for(folder))


def test_damaged_weights_are_a_configuration_error(folder: Path) -> None:
    """The message names the folder of a truncated file."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"cannot be loaded from {folder}"):
        load_from(folder)


def test_missing_weights_are_refused(folder: Path) -> None:
    """Transformers would initialize them at random; the message names the first missing tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for model.layers.1.mlp.up_proj.weight and 1 more"):
        load_from(folder)


def test_a_missing_tokenizer_is_a_configuration_error(folder: Path) -> None:
    """Transformers would build an empty tokenizer."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"{folder} has no tokenizer that can encode text"):
        load_from(folder)


def test_a_resume_uses_the_snapshots_dtype(folder: Path) -> None:
    """The dtype of the snapshot replaces `auto`, and not a configured dtype."""
    for configured, recorded, expected in (("auto", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32")):
        settings = settings_for(folder, dtype=configured)
        backbone = load(settings, outline(settings), dtype=recorded)
        assert backbone.arithmetic.name == expected
        assert backbone.model.dtype is getattr(torch, expected)


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused(folder: Path, device: str) -> None:
    """The message names the device."""
    with pytest.raises(ConfigError, match=f"backbone.device {device}: not usable on this machine"):
        load_from(folder, device=device)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_the_digest_covers_what_determines_the_result(folder: Path, name: str) -> None:
    """One changed byte of weights, configuration, tokenizer or template changes the digest."""
    before = digest(folder)
    file = folder / name
    file.write_bytes(file.read_bytes() + b" ")
    assert digest(folder) != before


CPU = torch.device("cpu")


def forbidden(*_: object, **__: object) -> float:
    raise AssertionError("no measurement expected")


def test_auto_never_measures_an_emulated_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 products computes in float32; the slow product is not measured."""
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(arithmetic, "product_seconds", forbidden)
    chosen = choose("auto", CPU)
    assert chosen.dtype is torch.float32
    assert chosen.reason == "the CPU has neither AMX nor AVX512-BF16"


@pytest.mark.parametrize(
    ("bf16_seconds", "dtype", "ratio"), [(0.5, torch.bfloat16, "2.0"), (2.0, torch.float32, "0.5")]
)
def test_auto_takes_the_faster_product(
    bf16_seconds: float, dtype: torch.dtype, ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with bf16 products they are measured, and the reason states the ratio."""
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: True)
    monkeypatch.setattr(arithmetic, "product_seconds", lambda d: bf16_seconds if d is torch.bfloat16 else 1.0)
    chosen = choose("auto", CPU)
    assert chosen.dtype is dtype
    assert chosen.reason == f"a bf16 product runs at {ratio} times the speed of float32 here"
