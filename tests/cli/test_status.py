"""The status command against a server with a test double for the loop: tables at several widths, and JSON."""

import io
import socket
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamlearn.cli import status as overview
from streamlearn.cli.main import app
from streamlearn.cli.options import TextConsole
from streamlearn.errors import SourceError
from streamlearn.settings import Settings
from streamlearn.status import Phase, PublicationStatus, RegimePublication, RegimeStatus, SliceScore, Status
from tests.serve.doubles import ADAPTATION, FIRST_SHIFT, RUNNING, SECOND_SHIFT, Daemon


def settings_of(port: int) -> Settings:
    return Settings.model_validate({"source": {"jsonl": {"path": "stream.jsonl"}}, "serve": {"port": port}})


def shown(daemon: Daemon, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(overview.tables(overview.fetch(settings_of(daemon.server.port))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def row(text: str, *begins: str) -> list[str]:
    (found,) = [words for words in map(str.split, text.splitlines()) if words[: len(begins)] == list(begins)]
    return found


def test_the_overview_has_progress_forgetting_and_durability(daemon: Daemon) -> None:
    """Phase, step, records, speed, requests, loss, AF, BWT, what answers the unknown, lag and the snapshot's age."""
    lines = [" ".join(line.split()) for line in shown(daemon, width=120).splitlines()]
    assert lines[:6] == [
        "phase running loss (smoothed) 2.750 nats/token",
        "step 42 forgetting (AF) 0.2500",
        "records 336 trained, 14 held out, 4 dead letters, 2 deletions transfer (BWT) -0.1250",
        "tokens/s 1,235 regime 3, 2 remembered",
        "requests 40 known, 3 unknown unknown answered by backbone (3.250 vs 3.375)",
        "lag 7 records snapshot step 40, 10 s ago",
    ]


def test_regimes_have_a_row_each_and_the_current_one_a_mark(daemon: Daemon) -> None:
    """Accuracy now, best and at the end of the segment; what was never scored is a dash."""
    text = shown(daemon)
    assert row(text, "1", "100") == ["1", "100", "2", "5", "1.250", "0.500", "0.750", "0.625", "40"]
    assert row(text, "*", "3") == ["*", "3", "250", "1", "0", "-", "-", "-", "-", "-"]


def test_names_and_frozen_regimes_have_a_column_where_there_are_any(daemon: Daemon) -> None:
    """Otherwise the table keeps its width for figures."""
    assert not {"name", "training"} & set(shown(daemon).split())
    past, present = ADAPTATION.regimes
    operated = (replace(past, frozen=True), replace(present, name="orders EU"))
    daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, regimes=operated)))
    text = shown(daemon)
    assert row(text, "1", "frozen")[2:] == ["100", "2", "5", "1.250", "0.500", "0.750", "0.625", "40"]
    assert row(text, "*", "3") == ["*", "3", "orders", "EU", "250", "1", "0", "-", "-", "-", "-", "-"]
    assert {"name", "training"} <= set(text.split())


def test_canaries_are_shown_with_the_largest_harm_first(daemon: Daemon) -> None:
    """And with the records that it is seen by; without canaries there is no such table."""
    assert "canaries" not in shown(daemon)
    rows = (SliceScore("general", 9, 1.5, 1.75), SliceScore("safety", 8, 2.5, 2.0, worst=("safety.jsonl:3",)))
    regimes = (replace(ADAPTATION.regimes[0], canaries=rows, canaries_step=40),)
    daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, regimes=regimes)))
    text = shown(daemon)
    assert row(text, "1", "safety") == ["1", "safety", "8", "2.500", "2.000", "+0.500", "40", "safety.jsonl:3"]
    assert text.index("safety") < text.index("general")


def test_a_version_that_harms_a_slice_names_it() -> None:
    """The slice with the smallest p-value, and its records."""
    rows = (SliceScore("general", 9, 1.5, 1.75, 0.9), SliceScore("safety", 8, 2.5, 2.0, 0.001, ("safety.jsonl:3",)))
    held_back = RegimePublication(1, None, "worse_on_canary", canaries=rows)
    assert overview._newest(held_back) == "held back: worse on canaries, slice safety (safety.jsonl:3)"


def test_shifts_show_evidence_and_cost(daemon: Daemon) -> None:
    """The first regime is no shift: it has neither evidence nor a probe."""
    text = shown(daemon)
    assert row(text, "start", "1") == ["start", "1", "1", "1", "new", "-", "-", "-", "-", "-"]
    found = row(text, "inputs", "104")
    assert found == ["inputs", "104", "101", "3", "new", "5.5", "3.25", "10,240", "7.5", "0.125"]


def test_a_split_is_told_from_a_new_regime(daemon: Daemon) -> None:
    """The stream did not move on: the regime that it was split from is still in it."""
    told = replace(ADAPTATION, shifts=(FIRST_SHIFT, replace(SECOND_SHIFT, parent=1)))
    daemon.board.publish(replace(RUNNING, adaptation=told))
    assert row(shown(daemon), "inputs", "104")[3:5] == ["3", "split"]


def test_of_many_regimes_those_with_the_newest_records_are_shown(daemon: Daemon) -> None:
    """By number, with how many there are."""
    many = tuple(RegimeStatus(number, number, last_record=1000 - number) for number in range(1, 101))
    daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, regimes=many)))
    text = shown(daemon)
    assert "last 20 of 100 regimes" in text
    table = text.partition("last 20 of 100 regimes")[2].partition("current regime")[0]
    numbers = [line.split()[0] for line in table.splitlines() if line.split() and line.split()[0].isdigit()]
    assert numbers == [str(number) for number in range(1, 21)]


def test_of_many_shifts_the_last_ten_are_shown(daemon: Daemon) -> None:
    """With their total."""
    many = tuple(replace(SECOND_SHIFT, number=n, declared_at=1000 + n, known=True) for n in range(1, 31))
    told = replace(ADAPTATION, shifts=many, num_shifts={"inputs": 29, "answers": 1})
    daemon.board.publish(replace(RUNNING, adaptation=told))
    text = shown(daemon)
    assert "last 10 of 30 shifts" in text
    assert [line.split()[1] for line in text.splitlines() if " known " in line and "inputs" in line] == [
        f"{n:,}" for n in range(1021, 1031)
    ]


def test_a_degraded_daemon_says_what_cannot_be_written(daemon: Daemon) -> None:
    """In a line of its own, before the figures."""
    daemon.board.publish(replace(RUNNING, degraded="snapshots cannot be written since 10:00: No space left on device"))
    assert shown(daemon, 80).startswith("degraded: snapshots cannot be written since 10:00")


def test_before_the_first_record_it_says_so(daemon: Daemon) -> None:
    """A starting daemon has a phase and its reason."""
    daemon.board.publish(Status(phase=Phase.STARTING, reason="the backbone is being loaded"))
    text = shown(daemon)
    assert "starting: the backbone is being loaded" in " ".join(text.split())
    assert "no regime yet" in text
    assert "no past regime scored yet" in text


@pytest.mark.parametrize("width", [40, 80, None])
def test_an_identifier_is_never_broken(daemon: Daemon, width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a narrow terminal lines are too long instead; without a terminal they are as long as they need to be."""
    name = "streamlearn-regime-1@199-5d3c1f"
    rows = (RegimePublication(1, name, held_back="worse_than_published", loss=1.0, published_loss=1.0, p_value=0.01),)
    publication = PublicationStatus(sequence=1, snapshot="00000199", written_at=1.0, regimes=rows)
    daemon.board.publish(replace(RUNNING, publication=publication))
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    console = TextConsole(file=io.StringIO())
    console.print(overview.tables(overview.fetch(settings_of(daemon.server.port))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert name in text
    assert "0.010" in row(text, "1", name) or width == 40, "nothing is cut off on the right"
    if width is None:
        assert " ".join(row(text, "1", name)).startswith(f"1 {name} held back: worse than the published version 1.000")


def test_the_command_prints_tables_or_json(daemon: Daemon, tmp_path: Path) -> None:
    """JSON is the unchanged answers of the endpoints."""
    config = tmp_path / "config.yaml"
    config.write_text(f"source: {{jsonl: {{path: a.jsonl}}}}\nserve: {{port: {daemon.server.port}}}\n")
    printed = CliRunner().invoke(app, ["status", "--config", str(config)], env={"COLUMNS": "100"})
    assert printed.exit_code == 0
    assert "336 trained" in printed.stdout
    as_json = CliRunner().invoke(app, ["status", "--config", str(config), "--json"])
    answers = orjson.loads(as_json.stdout)
    assert list(answers) == ["status", "regimes", "shifts", "publication"]
    for name in ("regimes", "shifts"):
        assert answers[name] == daemon.client.get(f"/v1/{name}").json()


def test_watch_shows_the_tables_again_and_keeps_them_while_the_daemon_is_unreachable() -> None:
    """With the fault above them; Ctrl-C ends it."""
    daemon, frames = Daemon(), list[str]()
    console = Console(file=io.StringIO(), width=100, height=60, force_terminal=True, color_system=None)
    settings = settings_of(daemon.server.port)
    turns = iter(("running", "unreachable", "stop"))

    def sleep(_: float) -> None:
        frames.append(console.file.getvalue())  # type: ignore[attr-defined]
        match next(turns):
            case "running":
                daemon.board.publish(replace(RUNNING, step=43))
            case "unreachable":
                daemon.stop()
            case _:
                raise KeyboardInterrupt

    overview.watch(settings, console, sleep)
    first, second, third = frames
    assert "step" in first
    assert "43" in second.removeprefix(first)
    assert "unreachable:" in third.removeprefix(second)
    assert "43" in third.removeprefix(second)


def test_without_a_daemon_the_message_says_what_to_do() -> None:
    """Exit 74, as for anything that cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{port}/v1/status: no daemon answers .*start it"):
        overview.fetch(settings_of(port))
    assert SourceError.exit_code == 74
