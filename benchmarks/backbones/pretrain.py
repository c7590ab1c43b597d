"""Pretrain the bundled nano backbone: tokenizer, weights, and the figures of its model card.

    python -m benchmarks.backbones.pretrain --data ../shared/data/pretrain --out build/nano

A causal LM with the Qwen3 architecture and 5.2 M parameters, trained from scratch on whole documents with a next-token
loss. The run is a function of the data, the seed and the number of steps.
"""

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from streamlearn.snapshot.files import share

END = "<|endoftext|>"
SPECIAL_TOKENS = [END, "<|pad|>", "<|im_start|>", "<|im_end|>", "<|image|>", *(f"<|extra_{i}|>" for i in range(3))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IGNORED = -100


@dataclass(frozen=True)
class PretrainRecipe:
    """Everything that determines the weights, apart from the data."""

    seed: int = 20261121
    steps: int = 4600
    tokens_per_step: int = 4096
    max_tokens: int = 1024
    peak_lr: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    held_out: int = 400
    """Number of documents at the end of the shuffled corpus that are never trained on."""


def nano_config() -> Qwen3Config:
    """Return the nano architecture: hidden size 256, 6 layers, tied embeddings, 5.2 M parameters."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        attention_bias=False,
    )


def read_texts(folder: Path) -> list[str]:
    """Return every `text` of the gzipped JSONL files in `folder`, in file and line order."""
    files = sorted(folder.glob("*.jsonl.gz"))
    if not files:
        raise SystemExit(f"--data: expected gzipped JSONL files with a `text` field, found no *.jsonl.gz in {folder}")
    texts: list[str] = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            texts.extend(json.loads(line)["text"] for line in lines)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which encodes every byte string without unknown tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=SPECIAL_TOKENS[1],
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> list[list[int]]:
    """Encode each text with an end token, and split it into pieces of at most `max_tokens`."""
    end = tokenizer.convert_tokens_to_ids(END)
    pieces: list[list[int]] = []
    for start in range(0, len(texts), 1000):
        for ids in tokenizer(texts[start : start + 1000])["input_ids"]:
            ended = [*ids, end]
            pieces.extend(ended[i : i + max_tokens] for i in range(0, len(ended), max_tokens))
    return [piece for piece in pieces if len(piece) > 1]


def batches(pieces: list[list[int]], recipe: PretrainRecipe) -> Iterator[Tensor]:
    """Yield padded batches of similar lengths, epoch after epoch; the seed determines their order."""
    epoch = 0
    while True:
        rng = random.Random(f"{recipe.seed}-{epoch}")
        order = list(range(len(pieces)))
        rng.shuffle(order)
        order.sort(key=lambda i: (len(pieces[i]) // 16, rng.random()))
        groups: list[list[int]] = [[]]
        for i in order:
            if groups[-1] and (len(groups[-1]) + 1) * len(pieces[i]) > recipe.tokens_per_step:
                groups.append([])
            groups[-1].append(i)
        rng.shuffle(groups)
        for group in groups:
            yield pad([pieces[i] for i in group])
        epoch += 1


def pad(rows: list[list[int]]) -> Tensor:
    """Pad with IGNORED on the right to (rows, longest); under a causal mask no real token attends to the padding."""
    longest = max(map(len, rows))
    return torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows])


def language_loss(model: Qwen3ForCausalLM, rows: Tensor, *, bf16: bool) -> Tensor:
    """Return the mean next-token loss of the batch, nats per token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(rows.clamp_min(0)).last_hidden_state[:, :-1]
        targets = rows[:, 1:]
        logits = model.lm_head(hidden[targets != IGNORED])
    return F.cross_entropy(logits.float(), targets[targets != IGNORED])


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, pieces: list[list[int]], *, bf16: bool) -> float:
    """Return the loss over held-out pieces, nats per token."""
    total, count = 0.0, 0
    for piece in pieces:
        total += language_loss(model, torch.tensor([piece]), bf16=bf16).item() * (len(piece) - 1)
        count += len(piece) - 1
    return total / count


def learning_rate(step: int, recipe: PretrainRecipe) -> float:
    """Return the learning rate: a linear warm-up, then a cosine decay to a twentieth of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: Qwen3ForCausalLM, recipe: PretrainRecipe) -> torch.optim.AdamW:
    """Build AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def prepare(data: Path, out: Path, recipe: PretrainRecipe) -> tuple[list[list[int]], list[list[int]]]:
    """Train and save the tokenizer; return the training pieces and the held-out pieces."""
    texts = read_texts(data)
    random.Random(recipe.seed).shuffle(texts)
    kept, held_out = texts[: -recipe.held_out], texts[-recipe.held_out :]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(kept, nano_config().vocab_size)
    tokenizer.save_pretrained(out)
    pieces = encode(kept, tokenizer, recipe.max_tokens)
    print(f"{len(kept)} texts, {sum(map(len, pieces))} tokens, {len(pieces)} pieces", flush=True)
    return pieces, encode(held_out, tokenizer, recipe.max_tokens)


def pretrain(data: Path, out: Path, recipe: PretrainRecipe, *, bf16: bool) -> None:
    """Run the recipe and write the model folder."""
    pieces, held_out = prepare(data, out, recipe)
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(nano_config())
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    optimizer = make_optimizer(model, recipe)
    started, seen = time.monotonic(), 0
    for step, rows in islice(enumerate(batches(pieces, recipe)), recipe.steps):
        loss = train_step(model, optimizer, rows, learning_rate(step, recipe), bf16=bf16)
        seen += int((rows != IGNORED).sum())
        if step % 100 == 0:
            rate = seen / (time.monotonic() - started)
            print(f"step {step} loss {loss:.3f} tokens/s {rate:.0f}", flush=True)
        if (step + 1) % 500 == 0:
            print(f"step {step + 1} held-out loss {held_out_loss(model, held_out, bf16=bf16):.4f}", flush=True)

    final = held_out_loss(model, held_out, bf16=bf16)
    model.to(torch.bfloat16).save_pretrained(out)
    figures = {"recipe": asdict(recipe), "tokens_an_epoch": sum(map(len, pieces)), "held_out_loss": final}
    (out / "pretrain.json").write_text(json.dumps(figures, indent=2) + "\n")
    share(out)
    print(f"finished: held-out loss {final:.4f}", flush=True)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, rows: Tensor, lr: float, *, bf16: bool) -> float:
    """Take one optimizer step and return the loss from before it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = language_loss(model, rows, bf16=bf16)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz files with a `text` field")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--steps", type=int, default=PretrainRecipe.steps)
    parser.add_argument(
        "--float32", action="store_true", help="disable bf16 autocast, for CPUs without fast bf16 matrix products"
    )
    arguments = parser.parse_args()
    pretrain(arguments.data, arguments.out, PretrainRecipe(steps=arguments.steps), bf16=not arguments.float32)


if __name__ == "__main__":
    main()
