"""Which files a data set's folder holds."""

from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from connectors.rows import data_files, open_files
from streamlearn.errors import SourceError, UsageError

from .kit import save_to_disk, values, write_jsonl, write_parquet

TABLES = [pa.table({"text": ["a", "b"]}), pa.table({"text": ["c"]})]


def test_a_saved_data_set_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TABLES)
    rows = [row for file in open_files(folder) for row in values(file)]
    assert rows == [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def test_a_saved_dictionary_needs_its_split(tmp_path: Path) -> None:
    """Unless it has one only."""
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, TABLES[:1])
    (tmp_path / "dataset_dict.json").write_bytes(orjson.dumps({"splits": ["train", "test"]}))
    with pytest.raises(UsageError, match=r"several splits: choose one with --split \(train, test\)"):
        data_files(tmp_path, None)
    with pytest.raises(UsageError, match=r"no split 'dev': expected one of train, test"):
        data_files(tmp_path, "dev")
    assert data_files(tmp_path, "test") == [tmp_path / "test" / "data-00000-of-00001.arrow"]
    (tmp_path / "dataset_dict.json").write_bytes(orjson.dumps({"splits": ["train"]}))
    assert len(data_files(tmp_path, None)) == 1


def test_a_state_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """Only names within the folder are used."""
    folder = save_to_disk(tmp_path / "saved", TABLES[:1])
    (folder / "state.json").write_bytes(orjson.dumps({"_data_files": [{"filename": "../../etc/x.arrow"}]}))
    assert data_files(folder, None) == [folder / "x.arrow"]
    (folder / "state.json").write_bytes(b"{}")
    with pytest.raises(SourceError, match=r"state\.json must hold a list '_data_files'"):
        data_files(folder, None)


def test_a_copy_of_a_hub_repository_is_read_by_split(tmp_path: Path) -> None:
    """The split is in the name of a file or of its folder; hidden files and others are left out."""
    names = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "test/rows.parquet"]
    for name in (*names, ".cache/x.parquet"):
        write_parquet(tmp_path / name, [{"text": name}])
    (tmp_path / "README.md").write_text("#")
    assert [values(file) for file in open_files(tmp_path, split="train")] == [[{"text": name}] for name in names[:2]]
    with pytest.raises(UsageError, match=r"--split \(test, train\)"):
        open_files(tmp_path)


def test_a_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl")
    write_jsonl(tmp_path / "a.jsonl")
    assert [path.name for path in data_files(tmp_path, None)] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(UsageError, match="no split 'train': expected one of none"):
        data_files(tmp_path, "train")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected files that end in \.parquet, .* found none"):
        data_files(tmp_path, None)


def test_one_file_has_no_split(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--split chooses among the files of a folder"):
        open_files(write_jsonl(tmp_path / "a.jsonl"), split="train")
