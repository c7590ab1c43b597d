"""How fast a whole training step is, as tokens per second, all arms in one run.

    streamlearn bench speed --json

`frozen_floor` is the backbone's own forward and backward pass (gradients reach its input, no weight has one): what no
adapter can beat. `lora` has the rank with which it activates as many parameters as `mh_moe`; `mh_moe_loop` computes
the same experts one by one. Arms take turns, one step each, and the median of each arm's steps is reported: what the
machine does meanwhile hits all alike. `daemon_over_loop` is the daemon's speed, from the file through decoding,
batching, journal and snapshots, over the bare steps on the same batches in memory. `images` is `speed_images`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from connectors.jsonl import JsonlSource
from streamlearn.adapters.check import activated_parameters, linear_shapes
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.adapters.model import attach
from streamlearn.adapters.presets import OBJECTIVES, resolve
from streamlearn.backbone import attention
from streamlearn.backbone.arithmetic import choose
from streamlearn.backbone.load import load, outline
from streamlearn.bench import speed_images
from streamlearn.bench.loop import loop_over_experts
from streamlearn.consolidate.consolidator import Consolidator
from streamlearn.errors import UsageError
from streamlearn.events import configure_logging
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    ConsolidateSettings,
    JsonlSettings,
    LearnerSettings,
    LogSettings,
    Settings,
    SourceSettings,
    StreamSettings,
)
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status
from streamlearn.stream.batch import Batch, Batcher
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Position

SAMPLE = Path(__file__).parents[2] / "configs/sample/superni.train.jsonl.gz"
STREAM = StreamSettings()
ARMS = ("frozen_floor", "lora", "loramoe", "mh_moe", "streamlearn", "mh_moe_loop")


@dataclass
class Arm:
    """One way to make a step."""

    name: str
    step: Callable[[Batch], Any]
    parameters: int
    """Activated per token."""
    speeds: list[float]
    """Tokens per second, one a round."""


def report(*, rounds: int, as_json: bool) -> None:
    """Measure everything and print it."""
    if not SAMPLE.exists():
        raise UsageError(f"{SAMPLE} is missing: run the benchmark from a clone of the repository")
    configure_logging("error")
    arithmetic = choose("auto", torch.device("cpu"))
    batches = sample_batches()
    shapes = {"nano": nano_backbone, "h1024": wide_backbone}
    result: dict[str, Any] = {name: measure(make, batches, rounds) for name, make in shapes.items()}
    daemon, loop = daemon_and_loop(rounds)
    result["daemon_over_loop"] = round(median(d / b for d, b in zip(daemon, loop, strict=True)), 3)
    result["images"] = speed_images.measure(max(3, rounds // 2))
    result["ratios"] = {name: ratios(result[name]) for name in shapes}
    result["setting"] = {
        "rounds": rounds,
        "dtype": arithmetic.name,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "daemon_tokens_per_s": round(median(daemon)),
        "loop_tokens_per_s": round(median(loop)),
    }
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON goes out as it is
    else:
        Console().print(table(result, tuple(shapes)))


def sample_batches(limit: int = 12) -> list[Batch]:
    """The first full batches of the bundled sample."""
    shape = outline(BackboneSettings())
    backbone = load(BackboneSettings(), shape)
    decoder, batcher = Decoder(backbone.tokenizer, STREAM, backbone.vocab_size), Batcher(STREAM)
    source = JsonlSource(JsonlSettings(path=SAMPLE))
    source.seek(Position())
    batches: list[Batch] = []
    while len(batches) < limit:
        for record in source.poll(max_records=16, timeout_s=0.0):
            batches.extend(batcher.add(record, decoder.decode(record)))
    source.close()
    return batches[:limit]


def nano_backbone() -> Any:
    """The bundled model."""
    return load(BackboneSettings(), outline(BackboneSettings())).model


def wide_backbone() -> Any:
    """A random Qwen3 of hidden size 1024, 4 layers."""
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
    return model.requires_grad_(requires_grad=False).eval()


def measure(make: Callable[[], Any], batches: Sequence[Batch], rounds: int) -> dict[str, float]:
    """Median tokens per second of each arm on one backbone."""
    arms = [arm(name, make) for name in ARMS]
    for each in arms:
        each.step(batches[0])  # kernels, allocator
    for number in range(rounds):
        batch = batches[number % len(batches)]
        for each in arms:
            started = time.perf_counter()
            each.step(batch)
            each.speeds.append(batch.num_tokens / (time.perf_counter() - started))
    return {each.name: round(median(each.speeds), 1) for each in arms}


def arm(name: str, make: Callable[[], Any]) -> Arm:
    """Build one arm on a backbone of its own."""
    model = make()
    if name == "frozen_floor":
        return Arm(name, floor_step(model), 0, [])
    shapes = linear_shapes(model)
    mh_moe = resolve(AdapterSettings(preset="mh-moe"))
    config = mh_moe
    if name == "lora":
        config = lora_as_large_as(mh_moe, shapes)
    elif name == "loramoe":
        config = resolve(AdapterSettings(preset="loramoe"))
    if name == "streamlearn":
        return Arm(name, _steered_step(model), activated_parameters(config, shapes), [])
    peft = attach(model, config, seed=0)
    if name == "mh_moe_loop":
        loop_over_experts(peft)
    learner = Learner(peft, LearnerSettings(), torch.device("cpu"))
    return Arm(name, lambda batch: learner.step(batch.examples), activated_parameters(config, shapes), [])


def _steered_step(model: Any) -> Callable[[Batch], Any]:
    """The default preset in its second regime: biased routing, a path integral, and anchors on every expert."""
    config = resolve(AdapterSettings(preset="streamlearn"), regimes=2)
    learner = Learner(
        attach(model, config, seed=0),
        LearnerSettings(),
        torch.device("cpu"),
        objective=OBJECTIVES["streamlearn"],
        integrate=True,
    )
    consolidator = Consolidator(learner, ConsolidateSettings(), experts_claimed=1, regimes=2, seed=0)
    consolidator.open(0, 1, None)
    everywhere = {name: torch.full_like(omega, 1e-6) for name, omega in learner.anchors.importance().items()}
    learner.anchors.consolidate(everywhere)
    return lambda batch: learner.step(batch.examples, [0] * len(batch.examples))


def lora_as_large_as(config: HeadLoraConfig, shapes: dict[str, tuple[int, int]]) -> HeadLoraConfig:
    """`lora` with the rank whose activated parameters come nearest to those of `config`."""
    wanted = activated_parameters(config, shapes)
    candidates = [resolve(AdapterSettings(preset="lora", rank=rank)) for rank in range(1, 129)]
    return min(candidates, key=lambda candidate: abs(activated_parameters(candidate, shapes) - wanted))


def floor_step(model: Any) -> Callable[[Batch], None]:
    """Forward and backward of the frozen model alone."""
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())

    def step(batch: Batch) -> None:
        torch.autograd.backward(packed_loss(model, pack(batch.examples, torch.device("cpu"))).mean)

    return step


def daemon_and_loop(rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second of the daemon and of the bare loop over the same batches, in turns."""
    pairs = [(daemon_speed(), loop_speed()) for _ in range(max(3, rounds // 2))]
    return [daemon for daemon, _ in pairs], [loop for _, loop in pairs]


def daemon_speed() -> float:
    """The whole bundled sample through the daemon, start-up not counted, the final snapshot counted."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_settings(Path(folder)))
        board = Board(Status(Phase.STARTING), Clock())
        started = time.perf_counter()
        Daemon(components, board, JobQueue(1)).run()
        seconds = time.perf_counter() - started
        tokens = components.state.tokens
        components.close()
    return tokens / seconds


def loop_speed() -> float:
    """The same batches, decoded before, one step after another."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_settings(Path(folder)))
        batches = []
        while (batch := components.intake.next_batch(timeout_s=0.0)) is not None or not components.source.exhausted:
            batches += [batch] if batch is not None else []
        batches += components.intake.flush()
        started = time.perf_counter()
        for batch in batches:
            components.learner.step(batch.examples)
        seconds = time.perf_counter() - started
        components.close()
    return sum(batch.num_tokens for batch in batches) / seconds


def _settings(folder: Path) -> Settings:
    return Settings(
        state=folder,
        source=SourceSettings(jsonl=JsonlSettings(path=SAMPLE)),
        log=LogSettings(level="error"),
    )


def ratios(speeds: dict[str, float]) -> dict[str, float]:
    """What the figures mean, machine left out."""
    return {
        "mh_moe_over_lora": round(speeds["mh_moe"] / speeds["lora"], 3),
        "mh_moe_over_loop": round(speeds["mh_moe"] / speeds["mh_moe_loop"], 3),
        "streamlearn_over_mh_moe": round(speeds["streamlearn"] / speeds["mh_moe"], 3),
        "mh_moe_over_floor": round(speeds["mh_moe"] / speeds["frozen_floor"], 3),
        "lora_over_floor": round(speeds["lora"] / speeds["frozen_floor"], 3),
    }


def table(result: dict[str, Any], shapes: Sequence[str]) -> Table:
    """The figures for a person."""
    shown = Table("tokens/s", *shapes, box=None, pad_edge=False)
    for name in ARMS:
        shown.add_row(name, *(f"{result[shape][name]:,.0f}" for shape in shapes))
    for name in result["ratios"][shapes[0]]:
        shown.add_row(name, *(f"{result['ratios'][shape][name]:.2f}" for shape in shapes))
    shown.add_row("daemon_over_loop", f"{result['daemon_over_loop']:.3f}")
    shown.add_row("image_path_over_ready", f"{result['images']['image_path_over_ready']:.3f}")
    return shown
