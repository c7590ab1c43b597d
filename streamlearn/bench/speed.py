"""Training speed in tokens per second: adapters, the daemon, and the image path.

    streamlearn bench speed --json

`speed_arms` measures whole training steps with different adapters, `speed_daemon` the daemon against bare steps, and
`speed_images` the decoding of images. All ratios compare steps that were taken in turns, so other load on the machine
affects both sides alike.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from streamlearn.backbone.arithmetic import choose
from streamlearn.bench import speed_images
from streamlearn.bench.speed_arms import (
    ARMS,
    SpeedArm,
    folder_backbone,
    measure,
    nano_backbone,
    sample_batches,
    wide_backbone,
)
from streamlearn.bench.speed_daemon import daemon_and_loop
from streamlearn.events import configure_logging

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


def report(*, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Measure everything and print it; `folder` has a further backbone."""
    configure_logging("error")
    arithmetic = choose("auto", torch.device("cpu"))
    batches = sample_batches()
    arms = {name: measure(make, batches, rounds) for name, make in BACKBONES.items()}
    if folder is not None:
        arms[folder.name] = measure(folder_backbone(folder), sample_batches(folder), rounds)
    daemon, loop = daemon_and_loop(rounds)
    result: dict[str, Any] = {
        "arms": {name: {arm: each.figures() for arm, each in found.items()} for name, found in arms.items()},
        "ratios": {name: ratios(found) for name, found in arms.items()},
        "daemon_over_loop": round(median(d / b for d, b in zip(daemon, loop, strict=True)), 3),
        "images": speed_images.measure(max(3, rounds // 2)),
        "setting": {
            "rounds": rounds,
            "dtype": arithmetic.name,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "daemon_tokens_per_s": round(median(daemon)),
            "loop_tokens_per_s": round(median(loop)),
        },
    }
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON is printed unformatted
    else:
        Console().print(table(result, tuple(arms)))


def ratios(arms: Mapping[str, SpeedArm]) -> dict[str, float]:
    """Return the ratios between arms: medians over the rounds, which depend less on the machine than speeds do."""
    return {
        f"{numerator}_over_{denominator}": round(
            median(a / b for a, b in zip(arms[numerator].speeds, arms[denominator].speeds, strict=True)), 3
        )
        for numerator, denominator in RATIOS
    }


def table(result: dict[str, Any], backbones: Sequence[str]) -> Table:
    """Build the table of speeds, memory and ratios."""
    shown = Table("", *backbones, box=None, pad_edge=False)
    for key, unit in (("tokens_per_s", "tokens/s"), ("step_mib", "MiB a step"), ("host_reads", "host reads a step")):
        shown.add_section()
        shown.add_row(f"[bold]{unit}")
        for arm in ARMS:
            shown.add_row(f"  {arm}", *(f"{result['arms'][name][arm][key]:,.0f}" for name in backbones))
    shown.add_section()
    shown.add_row("[bold]ratios")
    for ratio in result["ratios"][backbones[0]]:
        shown.add_row(f"  {ratio}", *(f"{result['ratios'][name][ratio]:.2f}" for name in backbones))
    shown.add_row("  daemon_over_loop", f"{result['daemon_over_loop']:.3f}")
    shown.add_row("  image_path_over_ready", f"{result['images']['image_path_over_ready']:.3f}")
    return shown
