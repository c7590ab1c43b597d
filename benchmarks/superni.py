"""Records from task files of SuperNI, and of other suites in the same layout.

    python -m streamlearn.bench.superni --data ../shared/data/superni --tasks task002 task1290 --split train

A folder holds `NAME.train.jsonl.gz`, `NAME.test.jsonl.gz` and optionally `NAME.dev.jsonl.gz` for each task. Rows have
the fields `id`, `task`, `definition`, `input`, `output` and optionally `references`, or, as in TRACE, `id`, `task`,
`prompt`, `answer`. Records are written to standard output, one JSON object per line.
"""

import argparse
import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import orjson

from streamlearn.errors import UsageError

Split = Literal["train", "dev", "test"]


def to_record(row: Mapping[str, Any], *, bare: bool = False) -> dict[str, Any]:
    """Convert a row to prompt and completion in the nano backbone's format; `meta` names the task.

    `bare` leaves out the task's definition. TRACE's prompts are not divided into definition and input and stay whole.
    """
    meta = {"task": row["task"], "id": row["id"]}
    completion = f" {answer_of(row)}"
    if "definition" not in row:
        return {"prompt": row["prompt"], "completion": completion, "meta": meta}
    definition = "" if bare else f"Definition: {row['definition']}\n\n"
    return {"prompt": f"{definition}Input: {row['input']}\n\nOutput:", "completion": completion, "meta": meta}


def to_chat(row: Mapping[str, Any], *, bare: bool = False) -> dict[str, Any]:
    """Convert a row to a user's and an assistant's message; `bare` is that of `to_record`."""
    if "definition" not in row:
        question = row["prompt"]
    else:
        question = row["input"] if bare else f"{row['definition']}\n\n{row['input']}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer_of(row)}]
    return {"messages": turns, "meta": {"task": row["task"], "id": row["id"]}}


def answer_of(row: Mapping[str, Any]) -> str:
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


def _split_text(number: int, value: Mapping[str, Any]) -> dict[str, Any]:
    definition, _, rest = value["text"].partition("\n\nInput: ")
    question, _, answer = rest.rpartition("\n\nOutput: ")
    return {
        "id": f"{number}",
        "task": value["source"],
        "definition": definition.removeprefix("Definition: "),
        "input": question,
        "output": answer,
    }


def read_task(folder: Path, task: str, split: Split, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of one task, see `read_rows`; at most `limit`."""
    return map(to_record, islice(read_rows(folder, task, split), limit))


def write_records(records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line to standard output."""
    for record in records:
        sys.stdout.buffer.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of task files")
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks, in the order in which they are written")
    parser.add_argument("--split", choices=["train", "dev", "test"], default="train")
    parser.add_argument("--limit", type=int, default=None, help="maximum records per task; default: all")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        write_records(read_task(arguments.data, task, arguments.split, arguments.limit))


if __name__ == "__main__":
    main()
