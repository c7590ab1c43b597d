"""Training steps with different adapters, on one backbone and the same batches.

`frozen_floor` is the backbone's own forward and backward pass: no weight has a gradient, but the embeddings do, so
that the backward pass runs through all layers. An adapter skips the part below the first adapted projection, and may be
faster by that. `lora` has the rank that activates as many parameters as `mh_moe`. `streamlearn_32` and
`streamlearn_300` are the default after that many regimes, of which as many are in memory as in the daemon. Arms take
turns, one step each. Speeds are medians, ratios medians over the rounds of the quotient within a round.

`mh_moe_loop` computes the experts of `mh_moe` one by one, as the public MixLoRA and LoRAMoE code does: gather an
expert's tokens, apply the expert, add the result. It equals `HeadLoraLinear` up to rounding.

    for m in heads, j in experts:  y[t] += (alpha / r) g_tmj B_mj A_mj h_tm   for the tokens t that chose j      (1)

`host_reads` counts what makes the host wait for the device: reads of a tensor's values, and shapes that depend on them.
On a GPU each drains the queue of kernels. On a CPU nothing waits, but the reads are the same.
"""
# Shape suffixes: T tokens, N tokens of one expert, D in features, H heads, S = D / H slice, K experts a head, R rank.

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measuring import SAMPLE, peak_mib, resident_mib
from connectors.jsonl import JsonlSource
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import PRESETS, HeadLoraConfig, activated_parameters, linear_shapes, resolve
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
from streamlearn.stream.position import Position
from streamlearn.stream.record import Batch

STREAM = StreamSettings()
REGIMES = {"streamlearn": 1, "streamlearn_32": 32, "streamlearn_300": 300}
"""Regimes that the arms of the default preset have learned; the batches are of the last one."""
ARMS = ("frozen_floor", "lora", "loramoe", "mh_moe", *REGIMES, "mh_moe_loop")
FOLDER_ARMS = ARMS[:-1]
"""For a backbone in a folder: a loop over experts keeps the outputs of each, 12 GB and more in SmolLM2-135M."""


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

    def results(self) -> dict[str, float]:
        return {
            "tokens_per_s": round(median(self.speeds), 1),
            "parameters": self.parameters,
            "step_mib": round(self.step_mib, 1),
            "host_reads": self.host_reads,
        }


def sample_batches(folder: Path | None = None, limit: int = 12, stream: StreamSettings = STREAM) -> list[Batch]:
    """Return the first full batches of the bundled sample, in the tokens of nano or of the model in a folder."""
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


WIDE = Qwen3Config(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)


def wide_backbone() -> Any:
    """Build a random Qwen3 with hidden size 1024 and 4 layers."""
    return random_backbone(WIDE, torch.device("cpu"))


def random_backbone(config: Qwen3Config, device: torch.device) -> Any:
    """Build a frozen model with random weights, in the dtype that is faster on the device."""
    torch.manual_seed(0)
    dtype = choose("auto", device).dtype
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model.requires_grad_(requires_grad=False).eval()
    find_plain_head(model)
    return model


def measure(
    make: Callable[[], Any], batches: Sequence[Batch], rounds: int, names: Sequence[str] = ARMS
) -> dict[str, SpeedArm]:
    """Measure each arm on one backbone; no further step can be taken."""
    with TemporaryDirectory() as evicted:
        return _measure([build_arm(name, make, Path(evicted) / name) for name in names], batches, rounds)


def _measure(arms: Sequence[SpeedArm], batches: Sequence[Batch], rounds: int) -> dict[str, SpeedArm]:
    for arm in arms:
        arm.step(batches[0])  # warms up kernels and allocator
        return_freed_memory()  # else the step takes what the one before has freed
        peak_mib(restart=True)
        before = resident_mib()
        arm.step(batches[0])
        arm.step_mib = peak_mib() - before
        with counting_host_reads() as reads:
            arm.step(batches[0])
        arm.host_reads = reads.total()
        return_freed_memory()
    for number in range(rounds):
        batch = batches[number % len(batches)]
        for arm in arms:
            started = time.perf_counter()
            arm.step(batch)
            arm.speeds.append(batch.num_tokens / (time.perf_counter() - started))
    for arm in arms:
        del arm.step  # and with it the arm's models: those of the next backbone need the memory
    return {arm.name: arm for arm in arms}


def build_arm(name: str, make: Callable[[], Any], evicted: Path) -> SpeedArm:
    """Build one arm on its own backbone; evicted adapters lie in the folder `evicted`."""
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
        return SpeedArm(name, _streamlearn_step(model, REGIMES[name], evicted), activated_parameters(config, shapes))
    peft = attach(model, config, seed=0)
    if name == "mh_moe_loop":
        loop_over_experts(peft)
    learner = Learner(peft, LearnerSettings(lr=1e-4), model.device)
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
        torch.autograd.backward(packed_loss(model, pack(batch.examples, model.device)).mean)

    return step


def _streamlearn_step(model: Any, regimes: int, evicted: Path) -> Callable[[Batch], Any]:
    settings = AdapterSettings(preset="streamlearn")
    learner = Learner(
        attach(model, resolve(settings), seed=0),
        LearnerSettings(lr=1e-4),
        model.device,
        router_lr=PRESETS["streamlearn"].objective.router_lr,
        cache=AdapterCache(evicted, settings.max_in_memory),
    )
    for slot in range(regimes):
        learner.add_regime(slot, seed=slot)
    return lambda batch: learner.step(batch.examples, [regimes - 1] * len(batch.examples))


class LoopedHeadLoraLinear(HeadLoraLinear):
    """`HeadLoraLinear` with a loop over heads and experts instead of batched products."""

    def experts(self, name: str, x: Tensor, y: Tensor, tokens_P: Tensor | None, weight: float = 1.0) -> Tensor:
        """Add the output of all experts to `y` by eq. (1)."""
        assert (tokens_P, weight) == (None, 1.0), "the loop is measured with experts that all regimes share"
        x_TD, y_TO = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        A_HKRS, B_HKRO = self.head_lora_A[name].to(y_TO.dtype), self.head_lora_B[name].to(y_TO.dtype)
        H, K, _, S = A_HKRS.shape
        gate_HKT = self.route(name, x_TD).to(y_TO.dtype)
        for m in range(H):
            h_TS = x_TD[:, m * S : (m + 1) * S]
            for j in range(K):
                t_N = gate_HKT[m, j].nonzero().squeeze(-1)
                z_NR = gate_HKT[m, j, t_N, None] * (h_TS[t_N] @ A_HKRS[m, j].T)
                y_TO = y_TO.index_add(0, t_N, z_NR @ B_HKRO[m, j], alpha=self.head_lora_config[name].scaling)
        return y_TO.view_as(y)


def loop_over_experts(model: nn.Module) -> None:
    """Switch every adapter layer of `model` to the loop; parameters and their names do not change."""
    for layer in model.modules():
        if type(layer) is HeadLoraLinear:
            layer.__class__ = LoopedHeadLoraLinear


READS = frozenset({"tolist", "numpy", "cpu", "__array__"})
"""Methods that copy a tensor's values to the host, besides those that end in `_local_scalar_dense`."""
DATA_DEPENDENT = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim", "equal"}
)
"""Operations whose result is on the host, or whose shape depends on the values."""


@contextmanager
def counting_host_reads() -> Iterator[Counter[str]]:
    """Count the host's reads inside the block, by operation. A copy and reads of that copy count separately."""
    counts: Counter[str] = Counter()
    with _Methods(counts), _Operations(counts):
        yield counts


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in READS:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = func.overloadpacket.__name__
        if name in DATA_DEPENDENT:
            self._counts[name] += 1
        elif name in {"index", "index_put", "index_put_"} and any(_is_mask(part) for part in args[1] or ()):
            self._counts[f"{name} by a mask"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}
