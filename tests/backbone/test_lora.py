"""`backbone.lora`: LoRAs as PEFT saves them, and which of them a run may begin from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamlearn.backbone.load import load, outline
from streamlearn.backbone.lora import CONFIG, WEIGHTS, LoraMatrices, PlainLora, read
from streamlearn.errors import ConfigError
from streamlearn.settings import AdapterSettings, BackboneSettings

LINEAR = "model.layers.0.mlp.up_proj"
FORMS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 7}},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
}


def save_lora(base: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A LoRA of stock PEFT with random weights beside the linears of `base`, in a folder."""
    torch.manual_seed(seed)
    values = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj", "down_proj"], **options}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def edit(folder: Path, change: dict[str, Any]) -> None:
    config = orjson.loads((folder / CONFIG).read_bytes())
    (folder / CONFIG).write_bytes(orjson.dumps({**config, **change}))


@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_are_those_of_peft(tiny: Path, tmp_path: Path, form: str) -> None:
    folder = save_lora(tiny, tmp_path / "lora", **FORMS[form])
    settings = BackboneSettings(model=str(tiny), dtype="float32")
    merged = load(settings, outline(settings, AdapterSettings(start=str(folder)))).model.state_dict()
    expected = weights_merged_by_peft(tiny, folder)
    before = load(settings, outline(settings)).model.state_dict()
    assert [name for name, weight in before.items() if not torch.equal(weight, merged[name])]
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)


def weights_merged_by_peft(base: Path, folder: Path) -> dict[str, Tensor]:
    """The weights after PEFT's own merge."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    weights: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return weights


def random_lora(names: dict[str, tuple[int, int]], rank: int, alpha: float) -> PlainLora:
    layers = {name: LoraMatrices(torch.randn(rank, i), torch.randn(o, rank)) for name, (i, o) in names.items()}
    return PlainLora(layers, rank, alpha)


def test_a_sum_applies_both_and_gives_its_own_part_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    start = random_lora({"a": (6, 4), "b": (3, 5)}, rank=2, alpha=5.0)
    own = random_lora({"b": (3, 5), "c": (2, 7)}, rank=3, alpha=4.0)
    both = own.after(start)

    def change(lora: PlainLora, name: str) -> Tensor | float:
        pair = lora.layers.get(name)
        return 0.0 if pair is None else lora.scaling * pair.B_ON @ pair.A_ND

    assert {tuple(pair.A_ND.shape) for pair in both.layers.values()} == {(5, 6), (5, 3), (5, 2)}
    for name in "abc":
        torch.testing.assert_close(change(both, name), change(start, name) + change(own, name))
    again = both.without(start)
    assert again.layers.keys() == own.layers.keys()
    for name, pair in own.layers.items():
        assert torch.equal(again.layers[name].A_ND, pair.A_ND)
        assert torch.equal(again.layers[name].B_ON, pair.B_ON)


TENSOR = f"base_model.model.{LINEAR}.lora_A.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora must not be set, found True"),
    "another method": ({"peft_type": "IA3"}, "peft_type must be LORA, found IA3"),
    "bias": ({"bias": "lora_only"}, "bias must not be set, found 'lora_only'"),
    "bias of B": ({"lora_bias": True}, "lora_bias must not be set"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save must not be set, found \['lm_head'\]"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices must not be set"),
    "PiSSA, which changes the weights too": ({"init_lora_weights": "pissa"}, "init_lora_weights must not be .*'pissa'"),
    "an option of tomorrow": ({"use_other_lora": True}, "use_other_lora must not be set"),
    "no alpha": ({"lora_alpha": None}, "adapter_config.json must have a number lora_alpha"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_exactly_is_refused(tiny: Path, tmp_path: Path, case: str) -> None:
    """With what was found, and what to do instead."""
    change, message = REFUSED[case]
    edit(save_lora(tiny, tmp_path / "lora"), change)
    refused(tiny, tmp_path / "lora", f"{message}.*merge it with PEFT")


def test_other_tensors_are_refused(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(save_lora(tiny, tmp_path / "lora") / WEIGHTS)
    file = tmp_path / "lora" / WEIGHTS
    changes: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda found: found.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight of shape"),
        (lambda found: found.pop(TENSOR), f"{LINEAR} must have matrices A"),
        (lambda found: found.update({TENSOR: found[TENSOR][:2].contiguous()}), f"{LINEAR} must have matrices A"),
        (dict.clear, "must have the matrices of a LoRA, found none"),
        (
            lambda found: found.update({TENSOR: found[TENSOR][:, :5].contiguous()}),
            f"needs a linear {LINEAR} of 5 to 64 features in a layer of the backbone, found one of 32 to 64",
        ),
    ]
    for change, message in changes:
        found = dict(tensors)
        change(found)
        save_file(found, file)
        refused(tiny, tmp_path / "lora", message)
    file.write_bytes(b"?")
    refused(tiny, tmp_path / "lora", "must be a safetensors file")


def test_linears_that_the_backbone_lacks_are_refused(tiny: Path, tmp_path: Path) -> None:
    """Also its output linear, which may share its weights with the embeddings."""
    folder = save_lora(tiny, tmp_path / "lora")
    tensors = load_file(folder / WEIGHTS)
    for name in ("lm_head", "model.layers.7.mlp.up_proj"):
        save_file({key.replace(LINEAR, name): tensor for key, tensor in tensors.items()}, folder / WEIGHTS)
        refused(
            tiny, folder, f"needs a linear {name} of 32 to 64 features in a layer of the backbone, found none; choose"
        )


def test_a_folder_without_its_files_and_an_unpinned_hub_id_are_refused(tiny: Path, tmp_path: Path) -> None:
    refused(tiny, tmp_path, "must have adapter_config.json and adapter_model.safetensors, found no adapter_config.json")
    refused(tiny, tmp_path / "none", "no such folder, and not a hub id")
    refused(tiny, Path("owner/name"), "adapter.start_revision: a hub id needs a pinned commit")


def test_a_quantized_backbone_has_no_start(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = BackboneSettings(model=str(tiny), quantization="int8")
    with pytest.raises(ConfigError, match=r"must not be quantized, found backbone\.quantization int8; set it to none"):
        outline(settings, AdapterSettings(start=str(save_lora(tiny, tmp_path / "lora"))))


def refused(base: Path, folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        outline(BackboneSettings(model=str(base)), AdapterSettings(start=str(folder)))


def test_zeros_fill_up_to_one_rank(tiny: Path, tmp_path: Path) -> None:
    lora = read(save_lora(tiny, tmp_path / "lora", **FORMS["patterns"]))
    assert {pair.A_ND.shape[0] for pair in lora.layers.values()} == {lora.rank} == {3}
