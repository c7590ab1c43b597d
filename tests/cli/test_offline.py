"""`streamlearn eval`: input, refusals and the table; the measurements are tested in jobs."""

import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from streamlearn.cli.offline import evaluate_daemon, evaluate_snapshot, evaluation_table, read_examples
from streamlearn.errors import ConfigError, SnapshotError, SourceError, UsageError
from streamlearn.jobs.queue import EvalResult
from streamlearn.settings import Settings
from streamlearn.snapshot.store import SnapshotStore
from tests.snapshot.kit import save

RESULT = EvalResult(
    step=12_345, examples=2, tokens=1_000_000, loss=1.5, perplexity=4.4817, token_accuracy=0.25,
    exact_match=0.5, rouge_l=None, seconds=0.125, per_example=(), num_known=1, num_unknown=1,
    answered_by={"regime": 1, "backbone": 1},
)  # fmt: skip


def settings(state: Path) -> Settings:
    return Settings.model_validate({"source": {"jsonl": {"path": "a.jsonl"}}, "state": state, "serve": {"port": 9}})


def test_examples_may_be_gzip(tmp_path: Path) -> None:
    """By the name's ending, like a source."""
    lines = b'{"text": "a"}\n{"prompt": "b", "completion": "c"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    expected = [{"text": "a"}, {"prompt": "b", "completion": "c"}]
    assert read_examples(tmp_path / "a.jsonl") == read_examples(tmp_path / "a.jsonl.gz") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{bad\n', "record 2 is not valid JSON"),
        (b"[1]\n", "expected a JSON object in record 1, found list"),
        (b"", "expected at least one record, found none"),
    ],
)
def test_unusable_examples_are_refused_before_anything_is_loaded(tmp_path: Path, content: bytes, message: str) -> None:
    """Exit 64, with the number of the record."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_examples(tmp_path / "a.jsonl")


def test_an_unknown_snapshot_is_named_with_those_that_exist(tmp_path: Path) -> None:
    """And without any, the message says to run the daemon."""
    with pytest.raises(SnapshotError, match="expected a snapshot, found none; run the daemon first"):
        evaluate_snapshot(settings(tmp_path), "newest", [{"text": "a"}], generate=False, max_new_tokens=1)
    save(SnapshotStore(tmp_path / "snapshots", keep=3), 3)
    with pytest.raises(ConfigError, match=r"--snapshot 00000004: no such snapshot in .*, found 00000003"):
        evaluate_snapshot(settings(tmp_path), "00000004", [{"text": "a"}], generate=False, max_new_tokens=1)


def test_without_a_daemon_the_message_names_both_ways(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no daemon answers .*streamlearn run.*--snapshot"):
        evaluate_daemon(settings(tmp_path), [{"text": "a"}], generate=False, max_new_tokens=1)


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_leaves_out_what_was_not_measured(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(evaluation_table(RESULT))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "ROUGE-L" not in text
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "step 12,345",
        "examples 2",
        "of known regimes 1",
        "answered by backbone 1",
        "answered by regime 1",
        "scored tokens 1,000,000",
        "loss (nats per token) 1.500000",
        "perplexity 4.482",
        "token accuracy 0.2500",
        "exact match 0.5000",
        "seconds 0.12",
    ]
