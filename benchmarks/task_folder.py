"""A folder of task files from a file of texts, for suites of many tasks.

    python -m streamlearn.bench.task_folder ../shared/data/pretrain/superni_other.jsonl.gz build/hundred --tasks 100
    streamlearn bench learn --suite build/hundred --method streamlearn --method lora ...

The tasks are drawn by seed from those with enough records. File names begin with a number, so that their order by name
is the drawn one. The last records of a task, in an order that depends on no seed, are its test records; training
records that ask the same are left out.
"""

import argparse
import gzip
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.superni import read_texts
from streamlearn.errors import UsageError

Json = Mapping[str, Any]


def divide(rows: Sequence[Json], tests: int) -> tuple[list[Json], list[Json]]:
    """Return the training rows and `tests` test rows; they have no input in common."""
    order = list(rows)
    random.Random("test").shuffle(order)
    train, test = order[: len(order) - tests], order[len(order) - tests :]
    asked = {row["input"] for row in test}
    return [row for row in train if row["input"] not in asked], test


def write_folder(file: Path, folder: Path, *, tasks: int, records: int, tests: int, seed: int) -> list[str]:
    """Write the folder and return the names of the tasks in their order.

    Args:
        file: The texts, see `read_texts`.
        folder: Where to write `NAME.train.jsonl.gz` and `NAME.test.jsonl.gz`; must not exist.
        tasks: Number of tasks.
        records: Minimum training records of each.
        tests: Test records of each.
        seed: Seed of the draw.

    Raises:
        UsageError: the folder exists, or the file does not hold so many tasks with so many records.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists; name a new folder")
    divided = {name: divide(rows, tests) for name, rows in read_texts(file).items() if len(rows) > tests}
    usable = {name: parts for name, parts in divided.items() if len(parts[0]) >= records}
    if len(usable) < tasks:
        raise UsageError(
            f"{file}: expected {tasks} tasks with {records} training and {tests} test records, found {len(usable)}"
        )
    drawn = random.Random(seed).sample(sorted(usable), tasks)
    names = [f"{number:03d}_{name.replace(':', '_')}" for number, name in enumerate(drawn)]
    folder.mkdir(parents=True)
    for name, task in zip(names, drawn, strict=True):
        for split, rows in zip(("train", "test"), usable[task], strict=True):
            _write(folder / f"{name}.{split}.jsonl.gz", rows)
    return names


def _write(file: Path, rows: Iterable[Json]) -> None:
    with gzip.open(file, "wb") as lines:
        lines.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the texts, one JSON object per line, gzip")
    parser.add_argument("folder", type=Path, help="new folder for the task files")
    parser.add_argument("--tasks", type=int, default=100, help="number of tasks (default: %(default)s)")
    parser.add_argument("--records", type=int, default=50, help="minimum training records (default: %(default)s)")
    parser.add_argument("--tests", type=int, default=15, help="test records of each task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: %(default)s)")
    given = parser.parse_args()
    try:
        names = write_folder(
            given.file, given.folder, tasks=given.tasks, records=given.records, tests=given.tests, seed=given.seed
        )
    except UsageError as error:
        parser.error(str(error))
    print(f"{given.folder}: {len(names)} tasks, {names[0]} to {names[-1]}")


if __name__ == "__main__":
    main()
