"""Training steps with different adapters, on one backbone and the same batches.

`frozen_floor` is the backbone's own forward and backward pass: no weight has a gradient, but the embeddings do, so
that the backward pass runs through all layers. An adapter does without the part below the first adapted projection,
and may be faster by that. `lora` has the rank that activates as many parameters as `mh_moe`. `mh_moe_loop` computes
the experts of `mh_moe` one by one. `streamlearn_32` and `streamlearn_300` are the default after so many regimes, of
which as many are in memory as in the daemon. Arms take turns, one step each. Speeds are medians, ratios medians over
the rounds of the quotient within a round.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.host_reads import counting_host_reads
from benchmarks.looped_experts import loop_over_experts
from benchmarks.measuring import SAMPLE, peak_mib, resident_mib
from connectors.jsonl import JsonlSource
from streamlearn.adapters.check import activated_parameters, linear_shapes
from streamlearn.adapters.presets import PRESETS, HeadLoraConfig, resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone import attention
from streamlearn.backbone.checks import find_plain_head
from streamlearn.backbone.load import choose, load, outline
from streamlearn.daemon.process import return_freed_memory
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    JsonlSettings,
    LearnerSettings,
    StreamSettings,
)
from streamlearn.stream.decode import Decoder
from streamlearn.stream.intake import Batcher
from streamlearn.stream.record import Batch, Position

STREAM = StreamSettings()
REGIMES = {"streamlearn": 1, "streamlearn_32": 32, "streamlearn_300": 300}
"""Regimes that the arms of the default preset have learned; the batches are of the last one."""
ARMS = ("frozen_floor", "lora", "loramoe", "mh_moe", *REGIMES, "mh_moe_loop")
FOLDER_ARMS = ARMS[:-1]
"""Those of a backbone in a folder: experts one by one keep the outputs of each, 12 GB and more in SmolLM2-135M."""


@dataclass
class SpeedArm:
    """One way to take a training step."""

    name: str
    step: Callable[[Batch], Any]
    parameters: int
    """Activated per token."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second, one value per round."""
    step_mib: float = 0.0
    """Memory that a step takes beyond what the process has before it."""
    host_reads: int = 0
    """Reads of the device in a step, see `host_reads`."""

    def figures(self) -> dict[str, float]:
        """The figures of the report."""
        return {
            "tokens_per_s": round(median(self.speeds), 1),
            "parameters": self.parameters,
            "step_mib": round(self.step_mib, 1),
            "host_reads": self.host_reads,
        }


def sample_batches(folder: Path | None = None, limit: int = 12, stream: StreamSettings = STREAM) -> list[Batch]:
    """Return the first full batches of the bundled sample in the tokens of nano, or of the model in a folder."""
    settings = BackboneSettings() if folder is None else BackboneSettings(model=str(folder))
    backbone = load(settings, outline(settings))
    decoder, batcher = Decoder(backbone.tokenizer, stream, backbone.vocab_size), Batcher(stream)
    source = JsonlSource(JsonlSettings(path=SAMPLE))
    source.seek(Position())
    batches: list[Batch] = []
    while len(batches) < limit:
        for record in source.poll(max_records=16, timeout_s=0.0):
            batches.extend(batcher.add(record, decoder.decode(record)))
    source.close()
    return batches[:limit]


def nano_backbone() -> Any:
    """Load the bundled model."""
    return load(BackboneSettings(), outline(BackboneSettings())).model


def folder_backbone(folder: Path) -> Callable[[], Any]:
    """Return what loads a causal language model from a folder."""
    settings = BackboneSettings(model=str(folder))
    return lambda: load(settings, outline(settings)).model


def wide_backbone() -> Any:
    """Build a random Qwen3 with hidden size 1024 and 4 layers."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dtype = choose("auto", torch.device("cpu")).dtype
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.requires_grad_(requires_grad=False).eval()
    find_plain_head(model)
    return model


def measure(
    make: Callable[[], Any], batches: Sequence[Batch], rounds: int, names: Sequence[str] = ARMS
) -> dict[str, SpeedArm]:
    """Measure each arm on one backbone; no further step can be taken."""
    with TemporaryDirectory() as resting:
        return _measure([build_arm(name, make, Path(resting) / name) for name in names], batches, rounds)


def _measure(arms: Sequence[SpeedArm], batches: Sequence[Batch], rounds: int) -> dict[str, SpeedArm]:
    for each in arms:
        each.step(batches[0])  # warms up kernels and allocator
        return_freed_memory()  # else the step takes what the one before has freed
        peak_mib(restart=True)
        before = resident_mib()
        each.step(batches[0])
        each.step_mib = peak_mib() - before
        with counting_host_reads() as reads:
            each.step(batches[0])
        each.host_reads = reads.total()
        return_freed_memory()
    for number in range(rounds):
        batch = batches[number % len(batches)]
        for each in arms:
            started = time.perf_counter()
            each.step(batch)
            each.speeds.append(batch.num_tokens / (time.perf_counter() - started))
    for each in arms:
        del each.step  # and with it the arm's models: those of the next backbone need the memory
    return {each.name: each for each in arms}


def build_arm(name: str, make: Callable[[], Any], resting: Path) -> SpeedArm:
    """Build one arm on its own backbone; adapters that are not in memory rest in the folder `resting`."""
    model = make()
    if name == "frozen_floor":
        return SpeedArm(name, floor_step(model), 0)
    shapes = linear_shapes(model)
    mh_moe = resolve(AdapterSettings(preset="mh-moe"))
    config = mh_moe
    if name == "lora":
        config = lora_as_large_as(mh_moe, shapes)
    elif name == "loramoe":
        config = resolve(AdapterSettings(preset="loramoe"))
    if name in REGIMES:
        return SpeedArm(name, _streamlearn_step(model, REGIMES[name], resting), activated_parameters(config, shapes))
    peft = attach(model, config, seed=0)
    if name == "mh_moe_loop":
        loop_over_experts(peft)
    learner = Learner(peft, LearnerSettings(lr=1e-4), torch.device("cpu"))
    return SpeedArm(name, lambda batch: learner.step(batch.examples), activated_parameters(config, shapes))


def lora_as_large_as(config: HeadLoraConfig, shapes: dict[str, tuple[int, int]]) -> HeadLoraConfig:
    """Return `lora` with the rank whose activated parameters are closest to those of `config`."""
    target = activated_parameters(config, shapes)
    candidates = [resolve(AdapterSettings(preset="lora", rank=rank)) for rank in range(1, 129)]
    return min(candidates, key=lambda candidate: abs(activated_parameters(candidate, shapes) - target))


def floor_step(model: Any) -> Callable[[Batch], None]:
    """Build the step of the frozen model: one forward and one backward pass."""
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())

    def step(batch: Batch) -> None:
        torch.autograd.backward(packed_loss(model, pack(batch.examples, torch.device("cpu"))).mean)

    return step


def _streamlearn_step(model: Any, regimes: int, resting: Path) -> Callable[[Batch], Any]:
    """The default preset in the last of its regimes."""
    settings = AdapterSettings(preset="streamlearn")
    learner = Learner(
        attach(model, resolve(settings), seed=0),
        LearnerSettings(lr=1e-4),
        torch.device("cpu"),
        router_lr=PRESETS["streamlearn"].objective.router_lr,
        cache=AdapterCache(resting, settings.max_in_memory),
    )
    for slot in range(regimes):
        learner.add_regime(slot, seed=slot)
    return lambda batch: learner.step(batch.examples, [regimes - 1] * len(batch.examples))
