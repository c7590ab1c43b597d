"""`streamlearn snapshots`: list, show and verify, as a terminal of 80 columns shows them."""

from pathlib import Path

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from streamlearn.cli import controls as snapshots
from streamlearn.cli import options
from streamlearn.cli.main import app
from streamlearn.snapshot.store import SnapshotStore
from tests.snapshot.kit import save


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration over a state folder with the snapshots of steps 3 and 42."""
    store = SnapshotStore(tmp_path / "state" / "snapshots", keep=3)
    for step in (3, 42):
        save(store, step)
    file = tmp_path / "config.yaml"
    file.write_text("source: {jsonl: {path: a.jsonl}}\nstate: state\n")
    return file


def invoke(*arguments: str) -> Result:
    result: Result = CliRunner().invoke(app, ["snapshots", *arguments])  # type: ignore[assignment]
    return result


def test_list_has_a_row_per_snapshot_newest_last(config: Path) -> None:
    """Name, time to the second, size and position."""
    rows = [line.split() for line in invoke("list", "--config", str(config)).output.splitlines()]
    assert rows[0] == ["snapshot", "written", "(UTC)", "bytes", "position"]
    assert [row[:3] for row in rows[2:]] == [[name, "2026-01-31", "12:00:00"] for name in ("00000003", "00000042")]
    assert [row[4:] for row in rows[2:]] == [["orders-0", "at", "12"], ["orders-0", "at", "168"]]


def test_show_prints_the_manifest_as_json(config: Path) -> None:
    assert orjson.loads(invoke("show", "00000042", "--config", str(config)).output)["step"] == 42


def test_verify_exits_74_if_a_snapshot_is_damaged(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And still verifies the others."""
    verified = invoke("verify", "--config", str(config))
    assert (verified.exit_code, verified.output) == (0, "00000003  intact\n00000042  intact\n")
    (config.parent / "state/snapshots/00000003/state.safetensors").write_bytes(b"")
    monkeypatch.setattr(snapshots, "err", options.out)  # both streams in order
    damaged = invoke("verify", "--config", str(config))
    assert damaged.exit_code == 74
    assert damaged.output.startswith("00000003  damaged: ")
    assert damaged.output.endswith("00000042  intact\n")
    assert invoke("verify", "00000042", "--config", str(config)).exit_code == 0
