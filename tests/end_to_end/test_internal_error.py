"""An error that nobody expected, in a daemon as a process."""

from pathlib import Path
from typing import NoReturn

import orjson
import yaml

from streamlearn.learner.learner import Learner
from tests.doubles import tiny_backbone
from tests.end_to_end.process import STOP_S
from tests.forked import ForkedProcess, run_command


def run_broken(arguments: list[str]) -> None:
    """`streamlearn ARGUMENTS`, with a step that fails."""

    def step(*_: object, **__: object) -> NoReturn:
        raise ValueError("nobody expected this")

    Learner.step = step  # type: ignore[method-assign]
    run_command(arguments)


def test_an_internal_error_exits_1_with_an_event(tmp_path: Path) -> None:
    """The unit restarts after it, and the crash guard counts it."""
    (tmp_path / "stream.jsonl").write_bytes(b'{"text": "hello world"}\n')
    config = {
        "state": str(tmp_path / "state"),
        "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl")}},
        "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "serve": {"port": 0},
        "log": {"style": "json"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    log = tmp_path / "log.jsonl"
    daemon = ForkedProcess(run_broken, ["run", "--config", str(tmp_path / "config.yaml")], stderr=log)
    assert daemon.wait(STOP_S) == 1
    events = [orjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    failed = [event for event in events if event["event"] == "daemon_failed"]
    assert [(event["error"], event["exit_code"]) for event in failed] == [("ValueError", 1)]
    assert b"nobody expected this" in log.read_bytes()
    assert (tmp_path / "state" / "in_progress").read_bytes().strip(b"\0\n"), "the batch is still in progress"
