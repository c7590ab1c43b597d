"""Training speed in tokens per second: adapters, and the daemon.

    python -m benchmarks.speed --json

All ratios compare steps that were taken in turns, so other load on the machine affects both sides alike.

- arms: whole training steps with different adapters, see `speed_arms`.
- daemon_over_bare: the daemon reads the bundled sample from its file, decodes, batches, holds records out, detects and
  enters regimes, scores, writes its journal and takes snapshots. Between its steps another learner takes bare ones on
  the same records. The first to see the shapes of a batch pays more: memory is mapped and, in bfloat16, kernels are
  compiled for them (3 % in the median and 6 % in sum). So the daemon is first with every other batch, and the bare
  steps with those between; an earlier pass knows which batches come next.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from benchmarks.daemon import QuietObserver, without_http
from benchmarks.measuring import SAMPLE, command, parser, positive, show
from benchmarks.speed_arms import (
    ARMS,
    FOLDER_ARMS,
    SpeedArm,
    folder_backbone,
    measure,
    nano_backbone,
    sample_batches,
    wide_backbone,
)
from streamlearn.backbone.load import choose
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon, Observer
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import (
    JsonlSettings,
    LogSettings,
    ProbeSettings,
    Settings,
    SourceSettings,
)
from streamlearn.status import Status
from streamlearn.stream.record import Batch, Example

BACKBONES: Mapping[str, Callable[[], Any]] = {"nano": nano_backbone, "h1024": wide_backbone}
RATIOS = (
    ("streamlearn", "lora"),
    ("streamlearn_32", "lora"),
    ("streamlearn_300", "lora"),
    ("mh_moe", "lora"),
    ("mh_moe", "mh_moe_loop"),
    ("lora", "frozen_floor"),
    ("mh_moe", "frozen_floor"),
)
"""Numerator and denominator of each ratio."""


def measure_all(rounds: int, folder: Path | None) -> dict[str, Any]:
    """Measure everything; `folder` has a further backbone."""
    batches = sample_batches()
    arms = {name: measure(make, batches, rounds) for name, make in BACKBONES.items()}
    if folder is not None:
        arms[folder.name] = measure(folder_backbone(folder), sample_batches(folder), rounds, FOLDER_ARMS)
    passes = daemon_passes(rounds)
    return {
        "arms": {name: {arm: result.results() for arm, result in own.items()} for name, own in arms.items()},
        "ratios": {name: ratios(own) for name, own in arms.items()},
        "daemon_over_bare": round(median(one.over_bare for one in passes), 3),
        "daemon_passes": [round(one.over_bare, 3) for one in passes],
        "setting": {
            "rounds": rounds,
            "dtype": choose("auto", torch.device("cpu")).name,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "daemon_tokens_per_s": round(median(one.tokens / one.daemon_s for one in passes)),
            "bare_tokens_per_s": round(median(one.tokens / one.bare_s for one in passes)),
        },
    }


def ratios(arms: Mapping[str, SpeedArm]) -> dict[str, float]:
    """Return the ratios between arms: medians over the rounds, which depend less on the machine than speeds do."""
    return {
        f"{numerator}_over_{denominator}": round(
            median(a / b for a, b in zip(arms[numerator].speeds, arms[denominator].speeds, strict=True)), 3
        )
        for numerator, denominator in RATIOS
        if {numerator, denominator} <= arms.keys()
    }


def table(result: dict[str, Any], backbones: Sequence[str]) -> Table:
    shown = Table("", *backbones, box=None, pad_edge=False)
    for key, unit in (("tokens_per_s", "tokens/s"), ("step_mib", "MiB a step"), ("host_reads", "host reads a step")):
        shown.add_section()
        shown.add_row(f"[bold]{unit}")
        for arm in ARMS:
            rows = (result["arms"][name].get(arm) for name in backbones)
            shown.add_row(f"  {arm}", *("-" if row is None else f"{row[key]:,.0f}" for row in rows))
    shown.add_section()
    shown.add_row("[bold]ratios")
    for ratio in result["ratios"][backbones[0]]:
        medians = (result["ratios"][name].get(ratio) for name in backbones)
        shown.add_row(f"  {ratio}", *("-" if value is None else f"{value:.2f}" for value in medians))
    shown.add_row("  daemon_over_bare", f"{result['daemon_over_bare']:.3f}")
    return shown


@dataclass(frozen=True)
class DaemonPass:
    """One pass of the daemon over the bundled sample; its time is without start-up and with the final snapshot."""

    tokens: int
    """Trained on, by the daemon and by the bare steps."""
    daemon_s: float
    bare_s: float

    @property
    def over_bare(self) -> float:
        return self.bare_s / self.daemon_s


def daemon_passes(rounds: int) -> list[DaemonPass]:
    """Return the times of several passes, after one that only finds out what is trained on."""
    seen = _TrainedBatches()
    _pass(seen)
    return [_measured_pass(seen.batches) for _ in range(max(3, rounds // 2))]


def _measured_pass(batches: Sequence[Sequence[Example]]) -> DaemonPass:
    with tempfile.TemporaryDirectory() as folder:
        bare = Components(_sample_settings(Path(folder)))
        steps = _BareSteps(bare.learner, batches)
        seconds, tokens = _pass(steps)
        bare.close()
    assert steps.tokens == tokens, "the daemon trains on the same records in each pass"
    return DaemonPass(tokens, daemon_s=seconds - steps.seconds, bare_s=steps.seconds)


def _pass(observer: Observer) -> tuple[float, int]:
    """Run the daemon over the sample; return the seconds, those of the observer included, and the tokens."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_sample_settings(Path(folder)))
        daemon = Daemon(components, *without_http(), observer=observer)
        started = time.perf_counter()
        daemon.run()
        seconds = time.perf_counter() - started
        components.close()
    return seconds, components.state.tokens


class _TrainedBatches(QuietObserver):
    """Keeps what the daemon trains on."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Example]] = []

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        del step, status
        self.batches.append(batch.examples)


class _BareSteps(QuietObserver):
    """Takes bare steps on the same batches: after every other step of the daemon, its batch and the next."""

    def __init__(self, learner: Learner, batches: Sequence[Sequence[Example]]) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._learner = learner
        self._due = list(zip_longest(batches[::2], batches[1::2]))
        self._daemon_is_first = True

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        del batch, step, status
        if self._daemon_is_first:
            started = time.perf_counter()
            self.tokens += sum(self._learner.step(batch).tokens for batch in self._due.pop(0) if batch is not None)
            self.seconds += time.perf_counter() - started
        self._daemon_is_first = not self._daemon_is_first


def _sample_settings(folder: Path) -> Settings:
    return Settings(
        state=folder,
        source=SourceSettings(jsonl=JsonlSettings(path=SAMPLE)),
        probe=ProbeSettings(similarity_tokens=512),  # as configs/quickstart.yaml, for the same sample
        log=LogSettings(level="error"),
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=positive, default=7, help="interleaved rounds; the median is reported")
    options.add_argument("--backbone", type=Path, help="also measure the causal language model in this folder")
    given = options.parse_args()
    result = measure_all(given.rounds, given.backbone)
    show(result, table(result, tuple(result["arms"])), as_json=given.json)


if __name__ == "__main__":
    command(main)
