"""Evaluation of a running daemon over HTTP, and of its snapshot offline."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import torch
import yaml
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import streamlearn.adapters  # noqa: F401 - registers the adapter type with PEFT
from streamlearn.cli.main import app
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon
from tests.learners import differences
from tests.variants import variants

QUESTIONS = [{"prompt": f"what is {i}?", "completion": f" {i} is {i}"} for i in range(12)]


def stream(count: int) -> bytes:
    """Records to learn, as JSONL."""
    rows = ({"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(count))
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(params=variants(["streamlearn", "mh-moe"], short=["streamlearn"]))
def daemon(request: pytest.FixtureRequest, tmp_path: Path, backbone: Path) -> Iterator[DaemonProcess]:
    """A daemon that follows a file of 40 records, without look-ahead."""
    lines = tmp_path / "stream.jsonl"
    lines.write_bytes(stream(40))
    process = ForkedDaemon(
        tmp_path / "daemon",
        {
            "source": {"jsonl": {"path": str(lines), "follow": True}},
            "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 4},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"preset": request.param, "num_heads": 4},
            "learner": {"lr": 1e-2},
            "shift": {"lookahead_records": 0},
            "holdout": {"every_records": 0},
            "serve": {"port": 0},
            "log": {"style": "json"},
        },
    )
    process.start()
    yield process
    process.end()


@contextmanager
def endpoint(daemon: DaemonProcess) -> Iterator[httpx2.Client]:
    """A client of the daemon, once it has trained on all records."""
    daemon.wait_until(lambda: bool(daemon.events("http_started")), "the endpoint is up")
    headers = {"authorization": f"Bearer {(daemon.state / 'http.token').read_text().strip()}"}
    url = f"http://127.0.0.1:{daemon.events('http_started')[-1]['port']}"
    with httpx2.Client(base_url=url, timeout=60, headers=headers) as client:
        daemon.wait_until(lambda: trained(client) == 40, "40 records are trained")
        yield client


def trained(client: httpx2.Client) -> int:
    """Records trained on so far, from the status."""
    return int(client.get("/v1/status").json()["records_trained"])


def plain_loss(backbone: Path, adapter: Path) -> float:
    """The loss on the questions with only transformers and PEFT, one record at a time, nats per token."""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(backbone), adapter).eval()
    total, count = 0.0, 0
    for question in QUESTIONS:
        prompt, answer = tokenizer(question["prompt"])["input_ids"], tokenizer(question["completion"])["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        count += len(answer)
    return total / count


def test_eval_agrees_with_the_snapshot_of_the_same_moment(daemon: DaemonProcess, backbone: Path) -> None:
    """POST /v1/eval equals `streamlearn eval --snapshot` to 1e-5, and without biases plain transformers and PEFT."""
    with endpoint(daemon) as client:
        status = client.get("/v1/status").json()
        preset = status["adapter_preset"]
        assert (status["backbone"], status["dtype"]) == (str(backbone), "float32")
        name = client.post("/v1/snapshots", json={}).json()["name"]
        evaluation = {"examples": QUESTIONS, "generate": True, "max_new_tokens": 16}
        over_http = client.post("/v1/eval", json=evaluation).json()
    questions = daemon.state.parent / "questions.jsonl"
    questions.write_bytes(b"".join(orjson.dumps(q, option=orjson.OPT_APPEND_NEWLINE) for q in QUESTIONS))
    command = ["eval", str(questions), "--config", str(daemon.config), "--snapshot", name]
    with capture_logs():
        printed = CliRunner().invoke(app, [*command, "--generate", "--max-new-tokens", "16", "--json"])
    offline: dict[str, Any] = orjson.loads(printed.stdout)

    assert over_http["loss"] == pytest.approx(offline["loss"], abs=1e-5)
    folder = daemon.state / "snapshots" / name / "adapter"
    plain = plain_loss(backbone, folder if preset == "mh-moe" else folder / "regime0")
    answered_by = {row["route"]["answered_by"] for row in over_http["per_example"]}
    assert (over_http["loss"] == pytest.approx(plain, abs=1e-5)) == ("backbone" not in answered_by)
    assert over_http["tokens"] == offline["tokens"]
    assert [row["output"] for row in over_http["per_example"]] == [row["output"] for row in offline["per_example"]]


def test_requests_change_no_bit_of_the_run(daemon: DaemonProcess) -> None:
    """Runs with and without requests end in the same bits."""
    with endpoint(daemon) as client:
        client.post("/v1/snapshots", json={})
        before = daemon.newest().tensors()
        for _ in range(3):
            assert client.post("/v1/eval", json={"examples": QUESTIONS, "generate": True}).status_code == 200
            asked = {"model": "streamlearn", "prompt": "say 3"}
            for options in ({"temperature": 0}, {"seed": 1, "stop": "4"}, {"seed": 1, "stream": True}):
                assert client.post("/v1/completions", json={**asked, **options}).status_code == 200
        lines = daemon.state.parent.parent / "stream.jsonl"
        with lines.open("ab") as more:
            more.write(stream(4))
        daemon.wait_until(lambda: trained(client) == 44, "44 records are trained")
    assert daemon.terminate() == 0
    after = daemon.newest().tensors()
    assert before.keys() != after.keys() or differences(before, after), "the four records were learned"

    # The same records without requests: a second daemon over the same file ends in the same bits.
    config = yaml.safe_load(daemon.config.read_text())
    del config["state"]
    quiet = ForkedDaemon(daemon.state.parent.parent / "quiet", config)
    try:
        quiet.learn(11)
        assert quiet.terminate() == 0
        silent = quiet.newest().tensors()
    finally:
        quiet.end()
    assert differences(after, silent) == []


def test_a_refusal_has_a_message_and_an_exit_code_without_a_traceback(tmp_path: Path) -> None:
    """Exit codes follow sysexits.h."""
    command = [sys.executable, "-m", "streamlearn", "run", "--config", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 78
    assert "absent.yaml: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
