"""The command line as a newcomer meets it: help, version, completion, exit codes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import orjson
import pytest
import typer
from typer.testing import CliRunner

from streamlearn import __version__
from streamlearn.cli import main as cli
from streamlearn.cli.main import app, main
from streamlearn.errors import ConfigError, SourceError, StreamlearnError

COMMANDS = """
run
feed
init
schema
eval
status
dead-letters list
dead-letters show
dead-letters export
export
gateway
snapshots list
snapshots show
snapshots verify
snapshots pin
snapshots unpin
snapshots rollback
pause
resume
regimes list
regimes freeze
regimes unfreeze
regimes rename
regimes approve
regimes drop
check-config
doctor
version
"""
HEAVY = ("torch", "transformers", "streamlearn.settings", "fastapi", "numpy", "kafka")


def invoke(*arguments: str, width: int = 80) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command and group, by its words."""
    found = {path: group}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*path, name))
    return found


def test_these_are_all_commands() -> None:
    leaves = [
        words for words, command in commands(typer.main.get_command(app)).items() if not hasattr(command, "commands")
    ]
    assert sorted(leaves) == sorted(tuple(line.split()) for line in COMMANDS.strip().splitlines())


def test_help_explains_every_command_and_option_in_80_columns() -> None:
    """Each help text is a sentence that ends with a period, so that two of them never run together."""
    for words, command in commands(typer.main.get_command(app)).items():
        text = invoke(*words, "--help")
        assert "…" not in text, words
        assert max(map(len, text.splitlines())) <= 80, words
        assert command.help.strip().endswith((".", "}")), words
        for parameter in command.params:
            assert getattr(parameter, "hidden", False) or (parameter.help or "").endswith("."), (words, parameter.name)


def numbers_of_commands() -> Iterator[tuple[str, ...]]:
    """The words of every command with a number, up to the number."""
    for words, command in commands(typer.main.get_command(app)).items():
        hints = get_type_hints(command.callback) if command.callback else {}
        for parameter in command.params:
            if re.search(r"\b(int|float)\b", str(hints.get(parameter.name))):
                yield (*words, *(option for option in parameter.opts if option.startswith("--")))


@pytest.mark.parametrize("words", list(numbers_of_commands()), ids=" ".join)
@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "-inf", "-1", f"{10**30}", "many"])
def test_a_number_is_finite_and_bounded(words: tuple[str, ...], value: str) -> None:
    """Whatever is compared with it, written as JSON or waited for."""
    result = CliRunner().invoke(app, [*words, *([] if words[-1].startswith("--") else ["--"]), value])
    shown = " ".join(line.strip("│ ") for line in result.output.splitlines())
    assert result.exit_code == 2
    assert re.search(rf"expected a (whole )?number from [\d.,]+ to [\d.,]+, found {re.escape(value)}", shown), shown


def test_version_is_one_line() -> None:
    assert invoke("--version") == f"streamlearn {__version__}\n"


def test_versions_name_what_decides_a_result() -> None:
    lines = invoke("version").splitlines()
    assert [line.split()[0] for line in lines] == [
        "streamlearn", "torch", "transformers", "peft", "kafka-python", "python",
    ]  # fmt: skip


NO_CONFIG = ("--config", "/nowhere/config.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["version"],
        ["run", *NO_CONFIG],
        ["check-config", *NO_CONFIG],
        ["doctor", *NO_CONFIG],
        ["export", "--all", "--out", "out", *NO_CONFIG],
    ],
    ids=" ".join,
)
def test_help_versions_and_a_missing_configuration_import_nothing_heavy(arguments: list[str]) -> None:
    """They answer at once."""
    heavy = [name for name in HEAVY if name != "streamlearn.settings" or "/nowhere/config.yaml" not in arguments]
    script = (
        f"import sys; sys.argv = ['streamlearn', *{arguments!r}]\n"
        "from streamlearn.cli.main import main\n"
        "try: main()\n"
        f"finally: print('heavy', [name for name in {heavy!r} if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.returncode == (78 if "--config" in arguments else 0), ended.stderr
    assert ended.stdout.endswith("heavy []\n")


def test_a_packaged_configuration_needs_no_file_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--config packaged:NAME` reaches the settings as it is."""
    assert "valid" in invoke("check-config", "--config", "packaged:quickstart")


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["streamlearn", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("arguments", [["nothing"], ["run"], ["run", "--config"], ["eval", "/nowhere", "-c", "x"]])
def test_a_wrong_command_line_exits_64(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """EX_USAGE of sysexits.h; typer would exit with 2."""
    assert run_main(monkeypatch, *arguments) == 64
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ConfigError("key: wrong, do this"), SourceError("nothing there"), StreamlearnError("x")]
)
def test_an_error_is_one_message_and_its_exit_code(
    error: StreamlearnError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback."""

    def refuse(_: Path) -> None:
        raise error

    monkeypatch.setattr(cli, "load_settings", refuse)
    assert run_main(monkeypatch, "check-config", "--config", "x.yaml") == error.exit_code
    printed = capsys.readouterr()
    assert printed.err == f"streamlearn: {error}\n"
    assert not re.search("Traceback", printed.out)


WRONG_KEY = "source: {jsonl: {path: x}}\nlearner: {lrr: 1}\n"
STYLE = "STREAMLEARN_LOG__STYLE"


@pytest.mark.parametrize(
    ("text", "environ", "is_json"),
    [
        (None, {}, True),
        (None, {STYLE: "console"}, False),
        (None, {"STREAMLEARN_LOG": "{style: console}", "STREAMLEARN_LEARNER__LRR": "1"}, False),
        ("log: {style: [", {}, True),
        ("log: {style: [", {STYLE: "console"}, False),
        ("log: [console]", {}, True),
        ("log: {style: loud}", {}, True),
        (WRONG_KEY, {}, True),
        (f"{WRONG_KEY}log: {{style: console}}", {}, False),
        (f"{WRONG_KEY}log: {{style: console}}", {STYLE: "json"}, True),
    ],
)
def test_run_refuses_a_configuration_in_the_style_of_its_log(
    text: str | None,
    environ: dict[str, str],
    is_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As far as the style can be known. Standard error is no terminal here."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text, encoding="utf-8")
    assert run_main(monkeypatch, "run", "--config", str(config)) == 78
    lines = capsys.readouterr().err.splitlines()
    if is_json:
        (event,) = map(orjson.loads, lines)
        assert (event["event"], event["error"], event["exit_code"]) == ("daemon_failed", "ConfigError", 78)
    else:
        assert lines[0].startswith("streamlearn: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected either --regime N or --all"),
        (["--all", "--regime", "1"], "expected either --regime N or --all"),
    ],
)
def test_an_export_without_a_clear_choice_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the configuration is read."""
    assert run_main(monkeypatch, "export", "-c", "x.yaml", "--out", "x", *options) == 64
    assert message in capsys.readouterr().err
