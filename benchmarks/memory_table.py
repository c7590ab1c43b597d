"""The estimated memory of a step against the measured peak, on configurations that differ in all that it depends on.

    streamlearn bench memory --backbone FOLDER --json > docs/memory.json

Each configuration takes its largest steps in a process of its own (`measured_step`), which is measured as a whole.
`streamlearn doctor` shows the same estimate (`learner.step_memory`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.own_process import in_own_process

NANO = "nano"


@dataclass(frozen=True)
class MeasuredConfiguration:
    """What a configuration sets."""

    backbone: str
    dtype: str
    quantization: str
    preset: str
    batch_tokens: int
    max_tokens: int
    checkpointing: bool
    held_out: bool = False
    """Whether the estimate was not fitted to it (`step_memory.KEPT_BY_GLIBC`)."""

    def sections(self, folder: Path | None) -> dict[str, Any]:
        """Return the sections of the configuration; `folder` has the backbone that is not nano."""
        model = "builtin:nano" if self.backbone == NANO else str(folder)
        return {
            "backbone": {"model": model, "dtype": self.dtype, "quantization": self.quantization, "device": "cpu"},
            "adapter": {"preset": self.preset},
            "stream": {"batch_tokens": self.batch_tokens, "max_tokens": self.max_tokens},
            "learner": {"activation_checkpointing": self.checkpointing},
        }


ON_NANO = (
    MeasuredConfiguration(NANO, "float32", "none", "streamlearn", 2048, 1024, checkpointing=False),
    MeasuredConfiguration(NANO, "float32", "none", "cp-moe", 8192, 1024, checkpointing=False),
    MeasuredConfiguration(NANO, "float32", "int8", "mh-moe", 8192, 1024, checkpointing=True),
    MeasuredConfiguration(NANO, "bfloat16", "none", "loramoe", 4096, 512, checkpointing=False, held_out=True),
)


def on_folder(name: str) -> tuple[MeasuredConfiguration, ...]:
    """Return the configurations of a further backbone."""
    return (
        MeasuredConfiguration(name, "float32", "none", "streamlearn", 1024, 512, checkpointing=False),
        MeasuredConfiguration(name, "float32", "nf4", "mh-moe", 1024, 1024, checkpointing=False),
        MeasuredConfiguration(name, "float32", "none", "streamlearn", 2048, 1024, checkpointing=True),
        MeasuredConfiguration(name, "bfloat16", "none", "cp-moe", 1024, 256, checkpointing=False),
        MeasuredConfiguration(name, "bfloat16", "nf4", "streamlearn", 2048, 1024, checkpointing=False),
        MeasuredConfiguration(name, "bfloat16", "int8", "lora", 2048, 1024, checkpointing=True),
        MeasuredConfiguration(name, "float32", "none", "streamlearn", 2048, 1024, checkpointing=False, held_out=True),
    )


def report(*, backbone: Path | None, as_json: bool) -> None:
    """Measure every configuration and print estimate and measurement.

    Raises:
        MeasurementError: a configuration could not be measured.
    """
    configurations = ON_NANO if backbone is None else (*ON_NANO, *on_folder(backbone.name))
    rows = [
        asdict(each) | in_own_process("benchmarks.measured_step", each.sections(backbone)) for each in configurations
    ]
    result = {
        "configurations": rows,
        "largest_miss_percent": max(abs(row["off_percent"]) for row in rows),
        "setting": {
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        },
    }
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON is printed unformatted
    else:
        Console().print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Build the table of estimates and measurements, MiB."""
    names = ("backbone", "dtype", "quantization", "preset", "batch_tokens", "max_tokens", "checkpointing", "held_out")
    figures = ("estimated_mib", "measured_mib", "off_percent")
    shown = Table(*names, *figures, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*(str(row[name]) for name in names), *(f"{row[name]:,.1f}" for name in figures))
    return shown
