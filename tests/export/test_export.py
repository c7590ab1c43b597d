"""`streamlearn export`: what stock libraries load from it computes what the daemon computes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import orjson
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from streamlearn.adapters.context import routing_context
from streamlearn.backbone.lora import CONFIG, WEIGHTS
from streamlearn.cli.offline import export, restored_model
from streamlearn.errors import ConfigError, SnapshotError, UsageError
from streamlearn.export import formats
from streamlearn.export.formats import ExportedRegime
from streamlearn.learner.loss import pack, packed_logits
from streamlearn.settings import Settings
from streamlearn.stream.record import Example
from tests.daemon.test_daemon import daemon_of, opened
from tests.publish.test_folder import assert_shared
from tests.regimes.conftest import backbone, make, maker
from tests.regimes.shifting_streams import run, stream

__all__ = ["backbone", "make"]

KEYS_OF_PEFT_0_11 = (
    "base_model_name_or_path|bias|fan_in_fan_out|inference_mode|lora_alpha|lora_dropout|peft_type|r|revision|"
    "target_modules|task_type"
)
TASKS = ("animals", "sums", "cities")
SCRIPT = """
import sys
sys.modules["streamlearn"] = None  # importing it fails
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

base, prompts, answers, beside, *folders = sys.argv[1:]
for folder in folders:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    if beside:
        model.load_adapter(beside, "beside")
        model.base_model.set_adapter(["default", "beside"])
    with torch.no_grad():
        rows = {name: model(input_ids=ids[None]).logits[0] for name, ids in load_file(prompts).items()}
    save_file(rows, f"{answers}/{folder.rpartition('/')[2]}.safetensors")
"""


def written(settings: Settings, out: Path, **options: Any) -> list[ExportedRegime]:
    """Export every regime of the newest snapshot, unless `options` say otherwise."""
    chosen = {"snapshot": "newest", "regimes": [], "form": "peft", "base": None, "approximate": False, **options}
    return export(settings, out=out, **chosen)


def daemons_logits(settings: Settings, slot: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens of the regime's hold-out records, and the daemon's logits for their learned tokens."""
    with restored_model(settings, "newest", same_dtype=True) as restored:
        examples = restored.model.adaptation.examples(slot)
        assert examples
        learner = restored.model.learner

        def logits(example: Example) -> Tensor:
            packed = pack([example], learner.device, [slot])
            with torch.no_grad(), routing_context(learner.model, packed.context()):
                return packed_logits(learner.model.get_base_model(), packed)

        tokens = {str(i): torch.from_numpy(example.input_ids.astype(np.int64)) for i, example in enumerate(examples)}
        return tokens, {str(i): logits(example) for i, example in enumerate(examples)}


def stock_logits(
    base: Path, folders: Sequence[Path], tokens: dict[str, Tensor], tmp_path: Path, *, beside: Path | None = None
) -> list[dict[str, Tensor]]:
    """What transformers and PEFT compute with each folder, in a process that cannot import streamlearn.

    `beside`: a folder whose LoRA is added to each of them.
    """
    prompts = tmp_path / "prompts.safetensors"
    save_file(tokens, prompts)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, base, prompts, tmp_path, beside or "", *folders], check=True, timeout=300
    )
    return [load_file(tmp_path / f"{folder.name}.safetensors") for folder in folders]


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """The learned tokens are the last of each record; the last logits predict nothing."""
    for name, logits_LV in expected.items():
        torch.testing.assert_close(found[name][-1 - len(logits_LV) : -1], logits_LV, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, backbone: Path) -> Settings:
    settings = maker(tmp_path_factory.mktemp("learned"), backbone)(stream(*TASKS))
    run(settings)
    return settings


def test_stock_peft_computes_what_the_daemon_computes(learned: Settings, backbone: Path, tmp_path: Path) -> None:
    """Every regime of three, on its hold-out records, to 1e-5, and not what the others compute."""
    exported = written(learned, tmp_path / "out")
    assert [regime.name for regime in exported] == ["regime-1", "regime-2", "regime-3"]
    assert {regime.fidelity for regime in exported} == {"exact"}
    every = [daemons_logits(learned, slot) for slot in range(3)]
    tokens = {f"{slot} {name}": ids for slot, (ids_by_name, _) in enumerate(every) for name, ids in ids_by_name.items()}
    found = stock_logits(backbone, [tmp_path / "out" / regime.name for regime in exported], tokens, tmp_path)
    for slot, regime in enumerate(exported):
        expected = {f"{slot} {name}": logits for name, logits in every[slot][1].items()}
        assert_same(expected, found[slot])
        with pytest.raises(AssertionError):
            assert_same(expected, found[slot - 1])
        assert regime.losses is not None
        assert regime.losses.exported < regime.losses.backbone - 0.1
        assert regime.losses.exported == pytest.approx(regime.losses.daemon, abs=1e-5)


@pytest.mark.parametrize("shape", ["adapter of its own", "lora"])
def test_stock_peft_opens_what_a_snapshot_has(
    make: Callable[..., Settings], backbone: Path, tmp_path: Path, shape: str
) -> None:
    """The folder of a regime, or of all, is a LoRA where a head has one expert; it needs no export."""
    adapter = {"preset": "lora", "num_heads": None} if shape == "lora" else {}
    settings = make(stream("animals", "sums"), adapter=adapter)
    run(settings)
    newest = max((settings.state / "snapshots").iterdir())
    tokens, expected = daemons_logits(settings, 1)
    folder = newest / "adapter" / ("" if shape == "lora" else "regime1")
    (found,) = stock_logits(backbone, [folder], tokens, tmp_path)
    assert_same(expected, found)


def test_a_snapshot_that_stock_peft_cannot_open_says_what_can(make: Callable[..., Settings]) -> None:
    settings = make(stream("animals"), adapter={"preset": "streamlearn-routed"})
    run(settings)
    folder = max((settings.state / "snapshots").iterdir()) / "adapter" / "regime0"
    assert "export --approximate" in (folder / "README.md").read_text()


def test_beside_a_quantized_backbone_the_export_is_still_exact(
    make: Callable[..., Settings], backbone: Path, tmp_path: Path
) -> None:
    settings = make(stream("animals"), backbone={"model": str(backbone), "quantization": "int8", "dtype": "float32"})
    run(settings)
    [exported] = written(settings, tmp_path / "out")
    assert exported.losses is not None
    assert exported.losses.exported == pytest.approx(exported.losses.daemon, abs=1e-5)


def test_one_adapter_for_all_regimes_is_one_folder(make: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make(stream("animals", "sums"), adapter={"preset": "lora", "num_heads": None})
    run(settings)
    with pytest.raises(UsageError, match="--regime: all regimes share one adapter here; use --all"):
        written(settings, tmp_path / "out", regimes=[1])
    (exported,) = written(settings, tmp_path / "out")
    assert (exported.name, exported.rank, exported.visits) == ("all-regimes", 20, 2)
    assert exported.losses is not None
    assert exported.losses.exported == pytest.approx(exported.losses.daemon, abs=1e-5)


def test_where_tokens_choose_nothing_is_written_unless_asked_for(
    make: Callable[..., Settings], backbone: Path, tmp_path: Path
) -> None:
    """The card has the losses of the files in stock PEFT, not of the daemon's experts."""
    settings = make(stream("animals", "sums"), adapter={"preset": "mh-moe", "num_heads": 4})
    run(settings)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"regime 2: tokens choose among \d experts per head.*--approximate"):
        written(settings, out, regimes=[2])
    assert not out.exists()
    (exported,) = written(settings, out, regimes=[2], approximate=True)
    assert exported.fidelity.startswith("approximate")
    assert exported.losses is not None
    assert abs(exported.losses.exported - exported.losses.daemon) > 1e-7
    assert f"| this export | {exported.losses.exported:.4f} |" in (out / "regime-2" / "README.md").read_text()
    tokens, expected = daemons_logits(settings, 1)
    (stock,) = stock_logits(backbone, [out / "regime-2"], tokens, tmp_path)
    losses = [
        cross_entropy(stock[name][-1 - len(logits_LV) : -1], tokens[name][-len(logits_LV) :], reduction="sum")
        for name, logits_LV in expected.items()
    ]
    assert float(sum(losses)) / exported.losses.tokens == pytest.approx(exported.losses.exported, abs=1e-5)


def test_llama_cpp_gets_the_same_matrices(learned: Settings, tmp_path: Path) -> None:
    written(learned, tmp_path / "out", regimes=[1])
    written(learned, tmp_path / "gguf", regimes=[1], form="gguf")
    expected = load_file(tmp_path / "out" / "regime-1" / WEIGHTS)
    reader = gguf.GGUFReader(tmp_path / "gguf" / "regime-1" / formats.GGUF)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == "qwen3"
    assert (fields["adapter.type"], fields["adapter.lora.alpha"]) == ("lora", 4 * 8.0)
    parts = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    assert len(found) == len(expected)
    for name, tensor in expected.items():
        _, _, _, _, layer, _, linear, matrix, _ = name.split(".")
        torch.testing.assert_close(
            found[f"blk.{layer}.{parts[linear]}.weight.{matrix.lower()}"], tensor, rtol=0, atol=0
        )


def test_an_architecture_that_llama_cpp_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--format gguf: expected a backbone of type llama, .*found unheard-of"):
        formats.check_gguf(SimpleNamespace(model_type="unheard-of"))


def test_transformers_reads_queries_and_keys_back_in_its_own_order() -> None:
    """It undoes the exchange of rows when it loads a GGUF of a Llama."""
    B_ON = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
    paired = formats._paired(B_ON, 4)
    assert not np.array_equal(paired, B_ON)
    restored = LlamaTensorProcessor()._reverse_permute_weights(paired, 4, 4)
    np.testing.assert_array_equal(restored, B_ON)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_other_users_may_read_what_the_umask_allows(learned: Settings, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for form in ("peft", "gguf"):
            written(learned, tmp_path / "out" / form, form=form)
    finally:
        os.umask(before)
    assert_shared(tmp_path, umask)


def test_nothing_tells_where_this_machine_has_its_models(learned: Settings, tmp_path: Path) -> None:
    """A card names a base model if the hub has it, in front matter that YAML reads; PEFT finds a folder by its path."""
    for base, named in ((None, None), ("org: model #2", None), ("served", None), ("org/name", "org/name")):
        folder = tmp_path / f"{named}{base}"
        written(learned, folder, base=base, regimes=[1])
        card = (folder / "regime-1" / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        assert (front.get("base_model"), "base_model_relation" in front) == (named, named is not None)
        assert learned.backbone.model not in card
        assert f'from_pretrained("{named or "BACKBONE"}", dtype=torch.float32)' in card
    config = orjson.loads((tmp_path / "NoneNone" / "regime-1" / CONFIG).read_bytes())
    assert config["base_model_name_or_path"] == learned.backbone.model
    assert all(re.fullmatch(KEYS_OF_PEFT_0_11, key) for key in config)


def test_nothing_is_overwritten(learned: Settings, tmp_path: Path) -> None:
    """Nor anything written, if one of several folders exists."""
    target = tmp_path / "out" / "regime-2"
    target.mkdir(parents=True)
    (target / "mine").touch()
    with pytest.raises(UsageError, match=r"out/regime-2 must not exist yet; remove it, or choose another --out"):
        written(learned, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["regime-2", "mine"]


def test_a_folder_that_cannot_be_completed_does_not_appear(
    learned: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *_: Any) -> None:
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "write_peft", full)
    with pytest.raises(SnapshotError, match=r"regime-1: cannot be written: .*No space left on device"):
        written(learned, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_unknown_regime_is_named_with_those_that_exist(learned: Settings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"snapshot \d+ must have regime 9, found 1, 2, 3"):
        written(learned, tmp_path / "out", regimes=[9])


def test_a_snapshot_before_the_first_record_has_nothing_to_export(learned: Settings, tmp_path: Path) -> None:
    settings = learned.model_copy(update={"state": tmp_path / "state"})
    with opened(settings) as components:
        daemon_of(components).save()
    with pytest.raises(SnapshotError, match=r"snapshot 00000000 has no regime yet; export again after the next"):
        written(settings, tmp_path / "out")


def test_two_exports_are_the_same_to_the_byte(learned: Settings, tmp_path: Path) -> None:
    for out in ("one", "other"):
        written(learned, tmp_path / out, base="org/name")
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert len(files) == 9
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    card = (tmp_path / "one" / "regime-2" / "README.md").read_text()
    assert 'base_model: "org/name"' in card
    assert "| records | 90 in 1 visit |" in card


def test_the_card_has_the_regimes_name(learned: Settings, tmp_path: Path) -> None:
    """Beside its number; the folder keeps the number only."""
    settings = learned.model_copy(update={"state": tmp_path / "state"})
    shutil.copytree(learned.state, settings.state)
    with opened(settings) as components:
        components.adaptation.rename(2, "orders EU")
        daemon_of(components).save()
    written(settings, tmp_path / "out")
    titles = [(tmp_path / "out" / f"regime-{number}" / "README.md").read_text() for number in (1, 2)]
    assert "# Regime 2 (orders EU) of snapshot" in titles[1]
    assert "# Regime 1 of snapshot" in titles[0]
