"""How many returns of tasks are recognised, by the number of records that a task has each time.

    streamlearn bench returns --json > docs/returns.json
    streamlearn bench returns --bare --json > docs/returns_bare.json

    streamlearn bench returns --bare --learn --tasks 20 --records 60 --json

The stream is that of `bench regimes`. Only the monitor reads it, which assigns records to regimes by their inputs; with
`--learn` the daemon does, which also checks each supposed return by its losses (`probe/return_check`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.many_regimes.learned_rounds import learn
from benchmarks.many_regimes.two_rounds import TwoRounds
from benchmarks.streams import text_decoder
from streamlearn.events import configure_logging
from streamlearn.settings import ShiftSettings
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.record import Batch, Example

BATCH_RECORDS = 8
COLUMNS = ("records", "regimes", "recognised", "taken_for_known", "purity")
LEARNED_COLUMNS = ("refused", "prequential_loss", "forgetting")


def report(
    *,
    others: Path,
    tasks: int,
    records: Sequence[int],
    seed: int,
    bare: bool,
    learned: bool,
    backbone: Path | None,
    as_json: bool,
) -> None:
    """Measure and print.

    Raises:
        UsageError: the file has too few tasks with so many records; raised before anything is measured.
    """
    configure_logging("error")
    streams = [TwoRounds.draw(others, tasks=tasks, records=number, seed=seed, bare=bare) for number in records]
    prompts = "bare" if bare else "definitions"
    rows = [measure_learned(each, backbone, seed) if learned else measure(each) for each in streams]
    result = {"tasks": tasks, "seed": seed, "prompts": prompts, "learned": learned, "returns": rows}
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(table(result))


def measure(drawn: TwoRounds) -> dict[str, Any]:
    """Assign the records of both rounds by their inputs; JSON-ready."""
    decoder, _ = text_decoder()
    tasks = len(drawn.segments) // 2
    monitor = Monitor(ShiftSettings(max_regimes=tasks + tasks // 4), vocab_size=1, seed=0)
    regimes = list(_regimes(monitor, [decoder.decode_value(record) for record in drawn.stream]))
    return {"records": drawn.records, "regimes": len(set(regimes)), **drawn.returns(regimes)}


def measure_learned(drawn: TwoRounds, backbone: Path | None, seed: int) -> dict[str, Any]:
    """Learn both rounds; JSON-ready."""
    regimes, figures = learn(drawn, backbone=backbone, seed=seed)
    return {"records": drawn.records, "regimes": len(set(regimes)), **drawn.returns(regimes), **figures}


def _regimes(monitor: Monitor, examples: Sequence[Example]) -> Iterator[int]:
    """The number of each record's regime when it is released for training."""
    numbers: dict[int, int] = {}

    def released(assigned: Sequence[AssignedBatch]) -> Iterator[int]:
        for each in assigned:
            numbers.update({shift.slot: shift.regime for shift in each.shifts})
            yield from (numbers[slot] for slot in each.slots)

    for start in range(0, len(examples), BATCH_RECORDS):
        yield from released(monitor.update(Batch((), tuple(examples[start : start + BATCH_RECORDS]))))
        while monitor.lookahead.take() is not None:  # what is trained on leaves the queue
            pass
    yield from released(monitor.flush())


def table(result: Mapping[str, Any]) -> Table:
    """One row per number of records."""
    columns = (*COLUMNS, *(LEARNED_COLUMNS if result["learned"] else ()))
    shown = Table(*columns, box=None, pad_edge=False)
    for row in result["returns"]:
        shown.add_row(*(f"{row[name]}" for name in columns))
    return shown
