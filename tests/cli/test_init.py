"""`streamlearn init` as a person meets it, and `streamlearn schema`."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from streamlearn.cli.init import SCHEMA
from streamlearn.cli.main import app
from streamlearn.errors import ConfigError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NANO = {"model": "builtin:nano"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=typed)


def written(*arguments: str, typed: str = "", file: str = "streamlearn.yaml") -> dict[str, Any]:
    """The configuration, which must pass check-config."""
    result = run(*arguments, typed=typed)
    assert result.exit_code == 0, result.output
    checked = CliRunner().invoke(app, ["check-config", "--config", file])
    assert f"{file}: valid; " in checked.output
    tree: dict[str, Any] = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    assert tree.pop("state") == "state"
    return tree


def test_defaults_are_taken_without_a_question() -> None:
    assert written("--yes") == {"source": {"jsonl": {"path": "records.jsonl"}}, "backbone": NANO}


def test_a_person_sees_the_questions_and_what_to_do_next(folder: Path) -> None:
    """A wrong answer is asked again; the keys of the first record are shown where none is a record's."""
    (folder / "tickets.jsonl").write_text('{"question": "Open?", "answer": "No."}\n', encoding="utf-8")
    assert run(typed="builtin:huge\nbuiltin:nano\nfile\ntickets.jsonl\n\nquestion\n{answer\nanswer\n").output == (
        "Model (builtin:nano, a folder or a hub id) [builtin:nano]: builtin:huge\n"
        "Error: backbone.model builtin:huge: no such model; builtin models are builtin:nano, builtin:nano-vl\n"
        "Model (builtin:nano, a folder or a hub id) [builtin:nano]: builtin:nano\n"
        "Records from a file or a topic [file]: file\n"
        "JSONL file [records.jsonl]: tickets.jsonl\n"
        "The first record has the keys question, answer.\n"
        "Form of the records (prompt, messages, text, input_ids) [prompt]: \n"
        "Key of the prompt [prompt]: question\n"
        "Key of the completion [completion]: {answer\n"
        "Error: records: expected '}' before end of string in '{answer'; write {{ for a brace\n"
        "Key of the completion [completion]: answer\n"
        "streamlearn.yaml is written. Next:\n"
        "  streamlearn check-config --config streamlearn.yaml --sample 3\n"
        "  streamlearn run --config streamlearn.yaml\n"
    )
    assert (folder / "streamlearn.yaml").read_text(encoding="utf-8") == (
        f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n"
        "# Relative paths start at this file. Every key is explained by the editor, and by `streamlearn schema`.\n"
        "state: state\n"
        "source:\n"
        "  jsonl:\n"
        "    path: tickets.jsonl\n"
        "records:\n"
        "  prompt: question\n"
        "  completion: answer\n"
        "backbone:\n"
        "  model: builtin:nano\n"
    )
    sample = CliRunner().invoke(app, ["check-config", "--config", "streamlearn.yaml", "--sample", "1"])
    assert "of 1 records: 1 learned" in sample.output


@pytest.mark.parametrize(("servers", "protocol"), [("localhost:9092", "PLAINTEXT"), ("a:9093,b:9093", "SSL")])
def test_a_topic_is_read_with_tls_unless_its_brokers_are_on_this_machine(servers: str, protocol: str) -> None:
    expected = {"kafka": {"bootstrap.servers": servers, "topics": ["tickets"], "security.protocol": protocol}}
    assert written(typed=f"\ntopic\n{servers}\ntickets\ntext\nbody\n") == {
        "source": expected,
        "records": {"text": "body"},
        "backbone": NANO,
    }
    options = ("--topic", "tickets", "--bootstrap-servers", servers, "--form", "messages")
    assert written(*options, "--yes", "--force") == {"source": expected, "backbone": NANO}


@pytest.mark.parametrize(
    ("record", "records"),
    [
        ({"messages": []}, None),
        ({"input_ids": [1], "meta": {}}, None),
        ({"prompt": "a", "completion": "b", "id": 3}, {"unknown_keys": "ignore"}),
    ],
)
def test_the_form_is_that_of_the_first_record(record: dict[str, Any], records: Any, folder: Path) -> None:
    """No question about it is needed; other keys are ignored."""
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(record) + "\n")
    assert written("--jsonl", "a.jsonl.gz", typed="\n\n").get("records") == records


def test_paths_are_relative_to_the_configuration(folder: Path) -> None:
    """Also that of a model's folder, which then begins with a dot."""
    model = folder / "models" / "own"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    (folder / "configs").mkdir()
    for file, path in (("here.yaml", "./models/own"), ("configs/there.yaml", "../models/own")):
        assert run(file, "--yes", "--model", "models/own", "--jsonl", "a.jsonl").exit_code == 0
        tree = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        assert tree["backbone"] == {"model": path}
        assert tree["source"]["jsonl"]["path"] == f"{path.partition('/')[0]}/a.jsonl".removeprefix("./")


def test_a_hub_model_is_pinned_to_its_newest_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or to the given one; without an answer of the hub the message says what to do."""
    monkeypatch.setattr("huggingface_hub.model_info", lambda _: SimpleNamespace(sha=COMMIT))
    pinned = {"model": "owner/name", "revision": COMMIT}
    assert written("--yes", "--model", "owner/name")["backbone"] == pinned
    monkeypatch.setattr("huggingface_hub.model_info", offline)
    assert written("--yes", "--model", "owner/name", "--revision", COMMIT, "--force")["backbone"] == pinned
    error = run("--yes", "--model", "owner/name", "--force").exception
    assert isinstance(error, ConfigError)
    assert str(error) == ("owner/name: its newest commit cannot be read from the hub: no route; set revision")


def offline(name: str) -> None:
    raise OSError("no route")


def test_an_existing_file_is_overwritten_only_if_told(folder: Path) -> None:
    file = folder / "streamlearn.yaml"
    file.write_text("mine\n", encoding="utf-8")
    for result in (run("--yes"), run(typed="n\n")):
        assert isinstance(result.exception, UsageError)
        assert "streamlearn.yaml exists and was not changed; add --force" in str(result.exception)
        assert file.read_text(encoding="utf-8") == "mine\n"
    assert run(typed="y\n" + "\n" * 6).exit_code == 0
    assert file.read_text(encoding="utf-8").startswith("# yaml-language-server")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic", "a", "--jsonl", "b"], "expected either --topic and --bootstrap-servers, or --jsonl, found both"),
        (["absent/a.yaml"], "absent/a.yaml: cannot be written: No such file or directory"),
        (["--model", "builtin:huge"], "no such model"),
        (["--model", "./huge"], "must be a folder, a builtin model or a hub id"),
    ],
)
def test_what_cannot_work_writes_nothing(arguments: list[str], message: str, folder: Path) -> None:
    result = run("--yes", *arguments)
    assert isinstance(result.exception, UsageError | ConfigError)
    assert message in str(result.exception)
    assert list(folder.iterdir()) == []


def test_the_schema_is_printed_as_it_ships() -> None:
    assert CliRunner().invoke(app, ["schema"]).output == SCHEMA.read_text(encoding="utf-8")
