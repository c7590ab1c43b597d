"""The training script of the nano backbone, on a handful of sentences."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.backbones import pretrain
from benchmarks.backbones.pretrain import IGNORED, PretrainRecipe
from tests.doubles import SENTENCES

RECIPE = PretrainRecipe(steps=4, tokens_per_step=64, warmup_steps=2, held_out=2, max_tokens=16)
SHORT = PretrainRecipe(steps=2, held_out=2)


def model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=320, num_hidden_layers=1, head_dim=8, **sizes))


def pieces() -> list[list[int]]:
    tokenizer = pretrain.train_tokenizer(list(SENTENCES) * 4, 320)
    return pretrain.encode(list(SENTENCES) * 4, tokenizer, RECIPE.max_tokens)


def test_texts_are_read_from_every_file(tmp_path: Path) -> None:
    """In the order of files and lines; a folder without any is refused."""
    for name, texts in (("b", ["three"]), ("a", ["one", "two"])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    assert pretrain.read_texts(tmp_path) == ["one", "two", "three"]
    with pytest.raises(SystemExit, match="--data: expected a folder of gzipped JSONL files"):
        pretrain.read_texts(tmp_path / "nowhere")


def test_batches_are_bounded_and_repeat(tmp_path: Path) -> None:
    """Every piece once an epoch, padded on the right within the bound, in an order that the seed determines."""
    own = pieces()
    one, two = pretrain.batches(own, RECIPE), pretrain.batches(own, RECIPE)
    found: list[list[int]] = []
    while len(found) < len(own):
        batch_BT, again_BT = next(one), next(two)
        assert torch.equal(batch_BT, again_BT)
        assert batch_BT.shape[0] == 1 or batch_BT.numel() <= RECIPE.tokens_per_step + 16 * len(batch_BT)
        found += [[token for token in piece if token != IGNORED] for piece in batch_BT.tolist()]
    assert sorted(found) == sorted(own)


def test_the_loss_leaves_padding_out() -> None:
    """A batch of two lengths has the mean loss of its real tokens."""
    made, (first, second) = model(), ([5, 6, 7, 8], [9, 10])
    with torch.no_grad():
        found = pretrain.language_loss(made, pretrain.pad([first, second]), bf16=False)
        separate = [pretrain.language_loss(made, torch.tensor([each]), bf16=False) for each in (first, second)]
    torch.testing.assert_close(found, (3 * separate[0] + separate[1]) / 4)


def test_the_learning_rate_warms_up_and_decays() -> None:
    """From a fraction to the peak, and down to a twentieth of it."""
    rates = [pretrain.learning_rate(step, PretrainRecipe()) for step in (0, 199, 200, PretrainRecipe.steps)]
    assert rates == pytest.approx(
        [PretrainRecipe.peak_lr / 200, PretrainRecipe.peak_lr, PretrainRecipe.peak_lr, 0.05 * PretrainRecipe.peak_lr]
    )


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    """Weights and moments after four steps equal those of two steps, a checkpoint and two more."""

    def train(made: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, steps: range) -> None:
        source = pretrain.batches(pieces(), RECIPE)
        for step, batch_BT in zip(range(steps.stop), source, strict=False):
            if step in steps:
                torch.autograd.backward(pretrain.language_loss(made, batch_BT, bf16=False))
                optimizer.step()
                optimizer.zero_grad()

    straight, stopped, resumed = model(), model(), model(seed=1)
    optimizers = [pretrain.make_optimizer(each, RECIPE) for each in (straight, stopped, resumed)]
    assert pretrain.load_checkpoint(tmp_path, resumed, optimizers[2]) == 0
    train(straight, optimizers[0], range(4))
    train(stopped, optimizers[1], range(2))
    pretrain.save_checkpoint(tmp_path, stopped, optimizers[1], 2)
    assert pretrain.load_checkpoint(tmp_path, resumed, optimizers[2]) == 2
    train(resumed, optimizers[2], range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_run_writes_model_and_figures(tmp_path: Path) -> None:
    """Two steps on a few texts, started twice with the same result."""
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": f"the quick brown fox number {i} runs"}) for i in range(12)]
    (data / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    losses = []
    for name in ("one", "two"):
        pretrain.pretrain(data, tmp_path / name, SHORT, bf16=False)
        losses.append(json.loads((tmp_path / name / "pretrain.json").read_text())["held_out_loss"])
    assert losses[0] == losses[1]
    assert (tmp_path / "one/model.safetensors").exists()
    assert pretrain.nano_config().vocab_size == 4096
