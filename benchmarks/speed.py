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

from benchmarks import speed_images
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
from benchmarks.speed_daemon import daemon_passes
from streamlearn.backbone.load import choose
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
        arms[folder.name] = measure(folder_backbone(folder), sample_batches(folder), rounds, FOLDER_ARMS)
    passes = daemon_passes(rounds)
    result: dict[str, Any] = {
        "arms": {name: {arm: each.figures() for arm, each in found.items()} for name, found in arms.items()},
        "ratios": {name: ratios(found) for name, found in arms.items()},
        "daemon_over_bare": round(median(each.over_bare for each in passes), 3),
        "daemon_passes": [round(each.over_bare, 3) for each in passes],
        "images": speed_images.measure(2 * rounds),
        "setting": {
            "rounds": rounds,
            "dtype": arithmetic.name,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "daemon_tokens_per_s": round(median(each.tokens / each.daemon_s for each in passes)),
            "bare_tokens_per_s": round(median(each.tokens / each.bare_s for each in passes)),
        },
    }
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result, tuple(arms)))


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
    """Build the table of speeds, memory and ratios."""
    shown = Table("", *backbones, box=None, pad_edge=False)
    for key, unit in (("tokens_per_s", "tokens/s"), ("step_mib", "MiB a step"), ("host_reads", "host reads a step")):
        shown.add_section()
        shown.add_row(f"[bold]{unit}")
        for arm in ARMS:
            found = (result["arms"][name].get(arm) for name in backbones)
            shown.add_row(f"  {arm}", *("-" if each is None else f"{each[key]:,.0f}" for each in found))
    shown.add_section()
    shown.add_row("[bold]ratios")
    for ratio in result["ratios"][backbones[0]]:
        medians = (result["ratios"][name].get(ratio) for name in backbones)
        shown.add_row(f"  {ratio}", *("-" if each is None else f"{each:.2f}" for each in medians))
    shown.add_row("  daemon_over_bare", f"{result['daemon_over_bare']:.3f}")
    shown.add_row("  image_path_over_ready", f"{result['images']['image_path_over_ready']:.3f}")
    return shown
