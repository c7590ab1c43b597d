"""What many regimes cost: speed, memory and snapshots by their number, and how many returns are recognised.

    streamlearn bench regimes --json --plot docs/regimes.png > docs/regimes.json

The daemon learns one task after another, drawn by seed from the file of other tasks, with their definitions. Then all
tasks return once, in another order and with other records. A return is recognised if most of its records belong to the
regime that most records of the task belonged to the first time.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from streamlearn.adapters.check import activated_parameters
from streamlearn.adapters.presets import resolve
from streamlearn.backbone.load import outline
from streamlearn.bench.many_regimes.measured_daemon import MeasuredDaemon
from streamlearn.bench.plot_option import drawing
from streamlearn.bench.superni import read_texts, to_record
from streamlearn.errors import UsageError
from streamlearn.events import configure_logging
from streamlearn.runtime.components import Components
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
    draw = None if plot is None else drawing(plot, "streamlearn.bench.many_regimes.regime_cost_plot")
    result = measure(others, tasks=tasks, records=records, backbone=backbone, seed=seed)
    if draw is not None:
        draw(result)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON is printed unformatted
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
    streams = draw_tasks(others, tasks=tasks, records=2 * records, seed=seed)
    names = list(streams)
    again = random.Random(f"again {seed}").sample(names, len(names))
    order = [(name, 0) for name in names] + [(name, records) for name in again]
    stream = [record for name, first in order for record in streams[name][first : first + records]]
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder), backbone, tasks, seed)
        settings.source.jsonl.path.write_bytes(  # type: ignore[union-attr]  # it is set by `settings_of`
            b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in stream)
        )
        daemon = MeasuredDaemon(settings, CHECKPOINTS, len(stream))
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
        **returns(daemon.regimes, [name for name, _ in order], records),
    }


def draw_tasks(others: Path, *, tasks: int, records: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Draw tasks with enough records, and of each its first `records` in an order of its own.

    Raises:
        UsageError: there is no such file, or it has too few such tasks.
    """
    texts = {name: rows for name, rows in read_texts(others).items() if len(rows) >= records}
    if len(texts) < tasks:
        raise UsageError(f"{others}: expected {tasks} tasks with {records} records, found {len(texts)}; lower --tasks")
    chosen = random.Random(seed).sample(sorted(texts), tasks)
    return {
        name: [to_record(row) for row in random.Random(f"{name} {seed}").sample(texts[name], records)]
        for name in chosen
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


def returns(regimes: Sequence[int], tasks: Sequence[str], records: int) -> dict[str, float]:
    """Share of the returns that were recognised, and of all records that are in their task's regime.

    Args:
        regimes: Of each record.
        tasks: The task of each segment of `records` records; the second half are returns.
        records: Records of a segment.
    """
    segments = [Counter(regimes[i : i + records]) for i in range(0, len(regimes), records)]
    majority: dict[str, int] = {}
    recognised = own = 0
    for task, found in zip(tasks, segments, strict=True):
        regime = found.most_common(1)[0][0]
        recognised += task in majority and majority[task] == regime
        own += found[majority.setdefault(task, regime)]
    return {"recognised": round(2 * recognised / len(tasks), 4), "purity": round(own / len(regimes), 4)}


def table(result: Mapping[str, Any]) -> Table:
    """The checkpoints, one per row; sizes in MiB."""
    shown = Table(*HEADINGS.values(), box=None, pad_edge=False)
    for row in result["checkpoints"]:
        shown.add_row(*(f"{row[name]:,.4g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in HEADINGS))
    return shown
