"""Opening of files of rows by their names."""

from collections.abc import Sequence
from pathlib import Path

from connectors.files.arrow_file import ArrowFile
from connectors.files.csv_file import CsvFile
from connectors.files.dataset_folder import SUFFIXES, data_files
from connectors.files.jsonl_file import JsonlFile
from connectors.files.parquet_file import ParquetFile
from connectors.files.row_file import RowFile
from streamlearn.errors import UsageError


def open_files(path: Path, *, split: str | None = None, delimiter: str | None = None) -> Sequence[RowFile]:
    """Return the files at a path: itself, or those of a data set's folder.

    Raises:
        UsageError: the folder holds no data files, the split is not known, or an extra is missing.
        SourceError: a file cannot be read.
    """
    if not path.is_dir():
        if split is not None:
            raise UsageError(f"--split chooses among the files of a folder, but {path} is one file: leave it out")
        return [open_file(path, delimiter)]
    return [open_file(each, delimiter) for each in data_files(path, split)]


def open_file(path: Path, delimiter: str | None = None) -> RowFile:
    """Return a file in the format that its name says; JSONL if it says none.

    Raises:
        UsageError: the format needs an extra that is missing, or is known not to be readable.
        SourceError: the file cannot be read.
    """
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".tsv"):
        return CsvFile(path, delimiter or ("\t" if suffix == ".tsv" else ","))
    if delimiter is not None:
        raise UsageError(f"--delimiter is for CSV, but {path} does not end in .csv or .tsv: leave it out")
    if suffix == ".parquet":
        return ParquetFile(path)
    if suffix in (".arrow", ".feather"):
        return ArrowFile(path)
    if suffix in (".json", ".xlsx", ".zip", ".zst", ".bz2", ".xz"):
        raise UsageError(f"{path}: expected a folder, or a file that ends in {', '.join(SUFFIXES)}: convert it first")
    return JsonlFile(path)
