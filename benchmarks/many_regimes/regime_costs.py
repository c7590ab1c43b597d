"""What many regimes cost: speed, memory and snapshots by their number, and how many returns are recognised.

    streamlearn bench regimes --json --plot docs/regimes.png > docs/regimes.json

The daemon learns one task after another, drawn by seed from the file of other tasks, with their definitions. Then all
tasks return once, in another order and with other records (`two_rounds`).
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.many_regimes.measured_daemon import MeasuredDaemon
from benchmarks.many_regimes.two_rounds import TwoRounds
from benchmarks.measuring import drawing
from streamlearn.adapters.check import activated_parameters
from streamlearn.adapters.presets import resolve
from streamlearn.backbone.load import outline
from streamlearn.daemon.build import Components
from streamlearn.events import configure_logging
from streamlearn.settings import (
    AdapterSettings,
    BackboneSettings,
    JsonlSettings,
    Settings,
    ShiftSettings,
    SnapshotSettings,
    SourceSettings,
)

CHECKPOINTS = (8, 32, 64, 128, 192, 256)
"""Numbers of regimes to measure at, besides that at the end."""
HEADINGS = {
    "regimes": "regimes",
    "in_memory": "loaded",
    "tokens_per_s": "tokens/s",
    "step_over_one_regime": "of one's",
    "other_ms_per_record": "other ms",
    "memory_mib": "MiB",
    "snapshot_mib": "snapshot",
    "new_mib": "written",
    "snapshot_s": "s",
}


def report(
    *, others: Path, tasks: int, records: int, backbone: Path | None, seed: int, as_json: bool, plot: Path | None
) -> None:
    """Measure, draw to `plot` if given, and print.

    Raises:
        UsageError: the file has too few tasks, or the plot cannot be written; raised before anything is measured.
    """
    configure_logging("error")
    draw = None if plot is None else drawing(plot, "benchmarks.many_regimes.regime_cost_plot")
    result = measure(others, tasks=tasks, records=records, backbone=backbone, seed=seed)
    if draw is not None:
        draw(result)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result))
        Console().print(
            f"returns recognised: {result['recognised']:.3f} of {result['tasks']} tasks; in their task's regime: "
            f"{result['purity']:.3f} of the records; restart with {result['regimes_at_the_end']} regimes: "
            f"{result['restart_s']:.1f} s",
            highlight=False,
        )


def measure(others: Path, *, tasks: int, records: int, backbone: Path | None, seed: int) -> dict[str, Any]:
    """Run the daemon over both rounds; JSON-ready."""
    drawn = TwoRounds.draw(others, tasks=tasks, records=records, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder), backbone, tasks, seed)
        settings.source.jsonl.path.write_bytes(  # type: ignore[union-attr]  # it is set by `settings_of`
            b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in drawn.stream)
        )
        daemon = MeasuredDaemon(settings, CHECKPOINTS, len(drawn.stream))
        daemon.run()
        daemon.components.close()
        began = time.perf_counter()
        restarted = Components(settings)
        restart_s = time.perf_counter() - began
        regimes_at_the_end = len(restarted.adaptation.numbers)
        restarted.close()
    return {
        "tasks": tasks,
        "records": records,
        "seed": seed,
        "max_in_memory": settings.adapter.max_in_memory,
        "adapter_parameters": parameters_of_one(settings),
        "checkpoints": [each.to_json() for each in daemon.checkpoints],
        "regimes_at_the_end": regimes_at_the_end,
        "restart_s": round(restart_s, 1),
        **drawn.returns(daemon.regimes),
    }


def settings_of(folder: Path, backbone: Path | None, tasks: int, seed: int) -> Settings:
    """The default configuration, with room for a regime per task, and for some that are split in error."""
    return Settings(
        state=folder / "state",
        seed=seed,
        source=SourceSettings(jsonl=JsonlSettings(path=folder / "stream.jsonl")),
        backbone=BackboneSettings() if backbone is None else BackboneSettings(model=str(backbone)),
        shift=ShiftSettings(max_regimes=max(ShiftSettings().max_regimes, tasks + tasks // 4)),
        snapshot=SnapshotSettings(every_records=1 << 30, every_s=1e9),  # at checkpoints only
    )


def parameters_of_one(settings: Settings) -> int:
    """Parameters of one regime's adapter."""
    return activated_parameters(resolve(AdapterSettings()), outline(settings.backbone).linears)


def table(result: Mapping[str, Any]) -> Table:
    """The checkpoints, one per row; sizes in MiB."""
    shown = Table(*HEADINGS.values(), box=None, pad_edge=False)
    for row in result["checkpoints"]:
        shown.add_row(*(f"{row[name]:,.4g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in HEADINGS))
    return shown
