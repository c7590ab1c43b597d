"""Which models are taken, which are refused before a weight is read, and in what words."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from streamlearn.backbone.load import BUILTIN, Backbone, digest, load, outline
from streamlearn.errors import ConfigError
from streamlearn.settings import BackboneSettings
from tests.backbone.conftest import Folders
from tests.doubles import VOCAB_SIZE, tiny_backbone

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(folder_of: Folders, tmp_path: Path) -> Path:
    """A model of the test's own, to be damaged."""
    return Path(shutil.copytree(folder_of("qwen3"), tmp_path / "model"))


def settings_for(folder: Path | str, **rest: Any) -> BackboneSettings:
    return BackboneSettings(model=str(folder), **{"dtype": "float32", "device": "cpu", **rest})


def load_from(folder: Path, **rest: Any) -> Backbone:
    settings = settings_for(folder, **rest)
    return load(settings, outline(settings))


def refusal(settings: BackboneSettings) -> str:
    """What `outline` says against it."""
    with pytest.raises(ConfigError) as caught:
        outline(settings)
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def config_alone(folder: Path, architecture: str) -> Path:
    """A folder that looks like a model and has a configuration but no weights."""
    AutoConfig.for_model(architecture).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def test_everything_is_frozen(folder: Path) -> None:
    """No parameter wants a gradient, no module is in training mode, and nothing was left to transformers' defaults."""
    backbone = load_from(folder)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert not any(module.training for module in backbone.model.modules())
    assert {parameter.dtype for parameter in backbone.model.parameters()} == {torch.float32}
    assert backbone.vocab_size == VOCAB_SIZE
    assert backbone.tokenizer("hello").input_ids


def test_the_double_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    """Saved twice, a tiny backbone has the same digest; another seed gives another, and the caller's draws stay."""
    state = torch.get_rng_state()
    one, two, other = (tiny_backbone(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert digest(one) == digest(two) != digest(other)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_outline_needs_no_weights(folder: Path) -> None:
    """Names and sizes of the decoder's linears, without the head, are known although the weights are rubbish."""
    (folder / "model.safetensors").write_bytes(b"rubbish")
    shape = outline(settings_for(folder))
    mlp = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    attention = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    wanted = {f"layers.{i}.mlp.{name}": sizes for i in range(2) for name, sizes in mlp.items()}
    wanted |= {f"layers.{i}.self_attn.{name}": sizes for i in range(2) for name, sizes in attention.items()}
    assert shape.linears == wanted


def test_the_builtin_model_is_there() -> None:
    """`builtin:nano` has a configuration that can be packed and a tokenizer beside it."""
    shape = outline(BackboneSettings(model="builtin:nano"))
    assert shape.folder == BUILTIN["builtin:nano"]
    assert "layers.0.mlp.up_proj" in shape.linears


def test_an_unknown_builtin_is_refused() -> None:
    """The message lists what there is."""
    assert (
        refusal(settings_for("builtin:giant"))
        == "backbone.model builtin:giant: no such model; builtin models are builtin:nano, builtin:nano-vl"
    )


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "one-word", "a/b/c"])
def test_a_missing_folder_is_refused(name: str) -> None:
    """What is neither a folder nor of the form owner/name is not looked for on the hub."""
    assert (
        refusal(settings_for(name)) == f"backbone.model {name}: no such folder, and not a hub id of the form owner/name"
    )


@pytest.mark.parametrize("revision", [None, "main", REVISION[:-1]])
def test_a_hub_id_needs_a_pinned_commit(revision: str | None) -> None:
    """A branch may move, so only a whole commit will do."""
    message = refusal(settings_for("owner/name", revision=revision))
    assert message.startswith(f"backbone.revision: a hub id needs a pinned commit of 40 hex digits, found {revision!r}")


def test_a_hub_id_is_had_at_its_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned commit is asked for, without code, and its files are the model's."""
    asked: list[tuple[str, str]] = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert not any("py" in pattern for pattern in allow_patterns)
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    backbone = load_from(Path("owner/name"), revision=REVISION)
    assert asked == [("owner/name", REVISION)]
    assert backbone.identity == {"model": "owner/name", "revision": REVISION, "digest": digest(folder)}


def test_an_unreachable_hub_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names model and commit."""

    def download(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = refusal(settings_for("owner/name", revision=REVISION))
    assert message == f"backbone.model owner/name at {REVISION}: cannot be downloaded from the hub: no route to host"


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    """Pickled weights are not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(settings_for(folder)) == (
        f"backbone.model {folder}: the folder has no *.safetensors; convert the weights with save_pretrained"
    )


def test_a_folder_without_a_configuration_is_refused(folder: Path) -> None:
    """The message says what it is not."""
    (folder / "config.json").unlink()
    assert "not a causal language model that this transformers knows" in refusal(settings_for(folder))


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """Only causal language models will do."""
    folder = config_alone(tmp_path, "clip")
    assert "not a causal language model that this transformers knows" in refusal(settings_for(folder))


def test_code_from_a_models_folder_is_not_run(folder: Path) -> None:
    """A folder that brings code of an unknown architecture is refused and its code stays unread."""
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
    """Soft-capping and layers with a state or chunks would be computed wrongly, so the model is not loaded."""
    change_config(folder, **changes)
    assert refusal(settings_for(folder)).startswith(f"backbone.model {folder}: {obstacle} cannot be packed; ")


@pytest.mark.parametrize("architecture", ["bloom", "gpt_oss"])
def test_an_architecture_that_ignores_the_packing_is_refused(architecture: str, tmp_path: Path) -> None:
    """Position biases and attention sinks live outside of the attention that packs."""
    folder = config_alone(tmp_path, architecture)
    assert "attention of its own kind (sinks, position biases, recurrent state) cannot be packed" in refusal(
        settings_for(folder)
    )


def test_damaged_weights_are_a_configuration_error(folder: Path) -> None:
    """A file cut short by a copy is named."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"cannot be loaded from {folder}"):
        load_from(folder)


def test_missing_weights_are_never_made_up(folder: Path) -> None:
    """Transformers fills a gap with random numbers; here the first missing tensor is named."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for model.layers.1.mlp.up_proj.weight and 1 more"):
        load_from(folder)


def test_weights_of_another_size_are_a_configuration_error(folder: Path) -> None:
    """Configuration and weights of two models do not go together."""
    settings = settings_for(folder)
    change_config(folder, intermediate_size=48)
    with pytest.raises(ConfigError, match=f"cannot be loaded from {folder}"):
        load(settings, outline(settings))


def test_a_missing_tokenizer_is_a_configuration_error(folder: Path) -> None:
    """Transformers makes an empty tokenizer where there is none; here it is missed."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"{folder} has no tokenizer that can encode text"):
        load_from(folder)


def test_a_resume_repeats_the_snapshots_arithmetic(folder: Path) -> None:
    """`auto` gives way to the dtype of the snapshot; a configured dtype does not."""
    for configured, remembered, wanted in (("auto", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32")):
        settings = settings_for(folder, dtype=configured)
        backbone = load(settings, outline(settings), dtype=remembered)
        assert backbone.arithmetic.name == wanted
        assert backbone.model.dtype is getattr(torch, wanted)


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused(folder: Path, device: str) -> None:
    """Before weights are read, with the device's name."""
    with pytest.raises(ConfigError, match=f"backbone.device {device}: not usable on this machine"):
        load_from(folder, device=device)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_the_digest_covers_what_decides_the_result(folder: Path, name: str) -> None:
    """One changed byte of weights, configuration, tokenizer or template gives another digest."""
    before = digest(folder)
    file = folder / name
    file.write_bytes(file.read_bytes() + b" ")
    assert digest(folder) != before


def test_the_digest_covers_names_and_nothing_else(folder: Path) -> None:
    """A renamed file counts; a note beside the model and its place on disk do not."""
    before = digest(folder)
    (folder / "README.md").write_text("a note")
    moved = folder.rename(folder.with_name("elsewhere"))
    assert digest(moved) == before
    (moved / "generation_config.json").rename(moved / "other_config.json")
    assert digest(moved) != before
