"""Task files as records: SuperNI's, and those of other suites in the same layout.

    python -m streamlearn.bench.superni --data ../shared/data/superni --tasks task002 task1290 --split train

A folder holds `NAME.train.jsonl.gz`, `NAME.test.jsonl.gz` and perhaps `NAME.dev.jsonl.gz`, one task a file, with the
fields `id`, `task`, `definition`, `input`, `output`, or, as TRACE has them, `id`, `task`, `prompt`, `answer`. The
records go to standard output, one JSON object a line.
"""

import argparse
import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import orjson

Split = Literal["train", "dev", "test"]


def to_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """One instance as prompt and completion, in the form that the nano backbone knows; `meta` names its task."""
    meta = {"task": row["task"], "id": row["id"]}
    if "definition" not in row:
        return {"prompt": row["prompt"], "completion": f" {row['answer']}", "meta": meta}
    return {
        "prompt": f"Definition: {row['definition']}\n\nInput: {row['input']}\n\nOutput:",
        "completion": f" {row['output']}",
        "meta": meta,
    }


def read_task(folder: Path, task: str, split: Split, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of one task, in file order; `task` may be the beginning of the file's name, such as `task002`.

    Raises:
        FileNotFoundError: no file or several files of that name.
    """
    files = [file for file in folder.glob(f"*.{split}.jsonl.gz") if file.name.split(".")[0].split("_")[0] == task]
    files = files or list(folder.glob(f"{task}.{split}.jsonl.gz"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder} holds {len(files)} {split} files of {task}; exactly one must be there")
    with gzip.open(files[0]) as lines:
        for line in islice(lines, limit):
            yield to_record(orjson.loads(line))


def write_records(records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line to standard output."""
    for record in records:
        sys.stdout.buffer.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of task files")
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks, one after the other")
    parser.add_argument("--split", choices=["train", "dev", "test"], default="train")
    parser.add_argument("--limit", type=int, default=None, help="records of each task; all unless given")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        write_records(read_task(arguments.data, task, arguments.split, arguments.limit))


if __name__ == "__main__":
    main()
