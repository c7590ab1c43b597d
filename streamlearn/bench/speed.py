"""Training speed in tokens per second: adapters, the daemon, and the image path.

    streamlearn bench speed --json

`speed_arms` measures whole training steps with different adapters, `speed_daemon` the daemon against bare steps, and
`speed_images` the decoding of images. All ratios compare steps that were taken in turns, so other load on the machine
affects both sides alike.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from streamlearn.backbone.arithmetic import choose
from streamlearn.bench import speed_images
from streamlearn.bench.speed_arms import ARMS, measure, nano_backbone, sample_batches, wide_backbone
from streamlearn.bench.speed_daemon import daemon_and_loop
from streamlearn.events import configure_logging

BACKBONES = {"nano": nano_backbone, "h1024": wide_backbone}


def report(*, rounds: int, as_json: bool) -> None:
    """Measure everything and print it."""
    configure_logging("error")
    arithmetic = choose("auto", torch.device("cpu"))
    batches = sample_batches()
    result: dict[str, Any] = {name: measure(make, batches, rounds) for name, make in BACKBONES.items()}
    daemon, loop = daemon_and_loop(rounds)
    result["daemon_over_loop"] = round(median(d / b for d, b in zip(daemon, loop, strict=True)), 3)
    result["images"] = speed_images.measure(max(3, rounds // 2))
    result["ratios"] = {name: ratios(result[name]) for name in BACKBONES}
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
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON is printed unformatted
    else:
        Console().print(table(result, tuple(BACKBONES)))


def ratios(speeds: dict[str, float]) -> dict[str, float]:
    """Return the ratios between arms, which depend less on the machine than the speeds do."""
    return {
        "mh_moe_over_lora": round(speeds["mh_moe"] / speeds["lora"], 3),
        "mh_moe_over_loop": round(speeds["mh_moe"] / speeds["mh_moe_loop"], 3),
        "streamlearn_over_mh_moe": round(speeds["streamlearn"] / speeds["mh_moe"], 3),
        "mh_moe_over_floor": round(speeds["mh_moe"] / speeds["frozen_floor"], 3),
        "lora_over_floor": round(speeds["lora"] / speeds["frozen_floor"], 3),
    }


def table(result: dict[str, Any], backbones: Sequence[str]) -> Table:
    """Build the table of speeds and ratios."""
    shown = Table("tokens/s", *backbones, box=None, pad_edge=False)
    for name in ARMS:
        shown.add_row(name, *(f"{result[backbone][name]:,.0f}" for backbone in backbones))
    for name in result["ratios"][backbones[0]]:
        shown.add_row(name, *(f"{result['ratios'][backbone][name]:.2f}" for backbone in backbones))
    shown.add_row("daemon_over_loop", f"{result['daemon_over_loop']:.3f}")
    shown.add_row("image_path_over_ready", f"{result['images']['image_path_over_ready']:.3f}")
    return shown
