"""Which files a data set's folder holds, in order.

Two layouts are known: what Hugging Face's `save_to_disk` writes (`state.json` beside Arrow files, and for several
splits `dataset_dict.json` above one such folder each), and any folder of data files, such as a copy of a hub
repository.
"""

import re
from pathlib import Path
from typing import Any

import orjson

from streamlearn.errors import SourceError, UsageError

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""Names that data files end in."""

_SPLIT = re.compile(r"(?:^|[-_./ ])(train|validation|valid|val|dev|test)(?=[-_./ ]|$)")


def data_files(folder: Path, split: str | None) -> list[Path]:
    """Return the data files of a folder, of one split if it has several.

    Raises:
        UsageError: there are none, or the split is not among those of the folder.
        SourceError: the folder's description cannot be read.
    """
    if (folder / "dataset_dict.json").exists():
        splits = _read(folder / "dataset_dict.json", "splits")
        return _saved(folder / _chosen(folder, split, [str(each) for each in splits]))
    if (folder / "state.json").exists():
        return _saved(folder)
    files = sorted(path for path in folder.rglob("*") if _is_data(path.relative_to(folder)) and path.is_file())
    if not files:
        raise UsageError(f"{folder}: expected files that end in {', '.join(SUFFIXES)}, found none")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    return by_split[_chosen(folder, split, sorted(by_split))] if split or len(by_split) > 1 else files


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a data set that was saved to disk."""
    files = _read(folder / "state.json", "_data_files")
    try:
        return [folder / Path(each["filename"]).name for each in files]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{folder / 'state.json'} must name data files, found {files!r}: save it again") from error


def _read(path: Path, key: str) -> list[Any]:
    try:
        return list(orjson.loads(path.read_bytes())[key])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(f"{path} must hold a list {key!r}, as save_to_disk writes it, found {error!r}") from error


def _chosen(folder: Path, split: str | None, splits: list[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise UsageError(f"{folder} has several splits: choose one with --split ({', '.join(filter(None, splits))})")
    if split not in splits:
        raise UsageError(
            f"{folder} has no split {split!r}: expected one of {', '.join(filter(None, splits)) or 'none'}"
        )
    return split


def _is_data(relative: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    return not hidden and relative.name.endswith(SUFFIXES)


def _split_of(relative: Path) -> str:
    """The split that a file's name or folder says, as the hub's layouts do; empty if none.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("rows.csv"))
    ('train', '')
    """
    found = _SPLIT.search(relative.as_posix())
    return found[1] if found else ""
