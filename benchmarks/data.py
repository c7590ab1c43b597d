"""Records from task files of SuperNI, and of other suites in the same layout.

    python -m benchmarks.data records ../shared/data/superni task002 task1290 --split train > records.jsonl
    python -m benchmarks.data folder ../shared/data/pretrain/superni_other.jsonl.gz build/hundred --tasks 100

A folder holds `NAME.train.jsonl.gz`, `NAME.test.jsonl.gz` and optionally `NAME.dev.jsonl.gz` for each task. Rows have
the fields `id`, `task`, `definition`, `input`, `output` and optionally `references`, or, as in TRACE, `id`, `task`,
`prompt`, `answer`. `records` writes records to standard output, one JSON object per line.

`folder` makes such a folder from a file of texts of many tasks. The tasks are drawn by seed from those with enough
records; file names begin with a number, so that their order by name is the drawn one. The last records of a task, in an
order that depends on no seed, are its test records; training records that ask the same are left out.
"""

import argparse
import gzip
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import orjson

from benchmarks.measuring import command, natural, positive
from streamlearn.errors import UsageError

Split = Literal["train", "dev", "test"]
Row = Mapping[str, Any]


def to_record(row: Row, *, bare: bool = False) -> dict[str, Any]:
    """Convert a row to prompt and completion in the nano backbone's format; `meta` names the task.

    `bare` leaves out the task's definition. TRACE's prompts are not divided into definition and input and stay whole.
    """
    meta = {"task": row["task"], "id": row["id"]}
    completion = f" {answer_of(row)}"
    if "definition" not in row:
        return {"prompt": row["prompt"], "completion": completion, "meta": meta}
    definition = "" if bare else f"Definition: {row['definition']}\n\n"
    return {"prompt": f"{definition}Input: {row['input']}\n\nOutput:", "completion": completion, "meta": meta}


def to_chat(row: Row, *, bare: bool = False) -> dict[str, Any]:
    """Convert a row to a user's and an assistant's message; `bare` is that of `to_record`."""
    if "definition" not in row:
        question = row["prompt"]
    else:
        question = row["input"] if bare else f"{row['definition']}\n\n{row['input']}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer_of(row)}]
    return {"messages": turns, "meta": {"task": row["task"], "id": row["id"]}}


def answer_of(row: Row) -> str:
    """Return a row's answer, without space around it; of several references, the first."""
    return str(row["answer"] if "answer" in row else row["output"]).strip()


def read_rows(folder: Path, task: str, split: Split) -> Iterator[dict[str, Any]]:
    """Yield the rows of one task in file order; `task` may be the first part of the file name, such as `task002`.

    Raises:
        FileNotFoundError: there is not exactly one file for the task.
    """
    files = [file for file in folder.glob(f"*.{split}.jsonl.gz") if file.name.split(".")[0].split("_")[0] == task]
    files = files or list(folder.glob(f"{task}.{split}.jsonl.gz"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder}: expected exactly one {split} file of {task}, found {len(files)}")
    with gzip.open(files[0]) as lines:
        for line in lines:
            yield orjson.loads(line)


def read_task(folder: Path, task: str, split: Split, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of one task, see `read_rows`; at most `limit`."""
    return map(to_record, islice(read_rows(folder, task, split), limit))


def read_texts(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a file of texts by task: "Definition: ...", "Input: ..." and "Output: ..." in one string.

    Raises:
        UsageError: there is no such file.
    """
    if not file.is_file():
        raise UsageError(f"{file}: no such file; set the file of other tasks with --others")
    with gzip.open(file) as lines:
        rows = sorted((_split_text(i, orjson.loads(line)) for i, line in enumerate(lines)), key=lambda row: row["task"])
    return {task: list(group) for task, group in groupby(rows, key=lambda row: row["task"])}


def _split_text(number: int, value: Row) -> dict[str, Any]:
    definition, _, rest = value["text"].partition("\n\nInput: ")
    question, _, answer = rest.rpartition("\n\nOutput: ")
    return {
        "id": f"{number}",
        "task": value["source"],
        "definition": definition.removeprefix("Definition: "),
        "input": question,
        "output": answer,
    }


def to_lines(records: Iterable[Row]) -> bytes:
    """Return JSON Lines."""
    return b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)


def write_folder(file: Path, folder: Path, *, tasks: int, records: int, tests: int, seed: int) -> list[str]:
    """Write a folder of drawn tasks and return their names in order.

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
    divided = {name: _divide(rows, tests) for name, rows in read_texts(file).items() if len(rows) > tests}
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
            (folder / f"{name}.{split}.jsonl.gz").write_bytes(gzip.compress(to_lines(rows)))
    return names


def _divide(rows: Sequence[Row], tests: int) -> tuple[list[Row], list[Row]]:
    """The training rows and `tests` test rows; they have no input in common."""
    order = list(rows)
    random.Random("test").shuffle(order)
    train, test = order[: len(order) - tests], order[len(order) - tests :]
    asked = {row["input"] for row in test}
    return [row for row in train if row["input"] not in asked], test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    records = verbs.add_parser("records")
    records.add_argument("data", type=Path, help="folder of task files")
    records.add_argument("tasks", nargs="+", help="tasks, in the order in which they are written")
    records.add_argument("--split", choices=["train", "dev", "test"], default="train")
    records.add_argument("--limit", type=positive, help="maximum records per task; default: all")
    folder = verbs.add_parser("folder")
    folder.add_argument("file", type=Path, help="the texts, one JSON object per line, gzip")
    folder.add_argument("folder", type=Path, help="new folder for the task files")
    folder.add_argument("--tasks", type=positive, default=100, help="number of tasks")
    folder.add_argument("--records", type=positive, default=50, help="minimum training records")
    folder.add_argument("--tests", type=positive, default=15, help="test records of each task")
    folder.add_argument("--seed", type=natural, default=0, help="seed of the draw")
    given = parser.parse_args()
    if given.verb == "records":
        for task in given.tasks:
            sys.stdout.buffer.write(to_lines(read_task(given.data, task, given.split, given.limit)))
        return
    names = write_folder(
        given.file, given.folder, tasks=given.tasks, records=given.records, tests=given.tests, seed=given.seed
    )
    print(f"{given.folder}: {len(names)} tasks, {names[0]} to {names[-1]}")


if __name__ == "__main__":
    command(main)
