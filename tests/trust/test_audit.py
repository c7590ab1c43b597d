"""A whole run under an audit hook: what hostile records make the process open, execute or connect to."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.vision import as_base64, make_image, tiny_vision_backbone

ROOT = Path(__file__).parents[2]
PLACES = (
    "http://169.254.169.254/latest/meta-data/",
    "https://127.0.0.1:9/x.png",
    "file:///etc/passwd",
    "../../etc/passwd",
    "/etc/passwd",
    "/etc/passwd0",  # valid base64 by accident
    "data:image/png;base64,AAAA",
    "ftp://127.0.0.1/x.png",
    "\\\\127.0.0.1\\x.png",
)
KNOWN = {
    "<template> by environment.py:_compile",  # jinja2: the backbone's chat template, rendered in a sandbox
    "<template> by environment.py:from_code",
    "<string> by typing.py:__init__",  # a quoted annotation, compiled to check its syntax but not executed
}
Events = list[tuple[str, str]]


def records() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records that are learned, some with such places in their text, and records that must be refused."""
    good: list[dict[str, Any]] = [{"prompt": f"what is at {place}?", "completion": " nothing"} for place in PLACES]
    good += [{"prompt": f"which {i}?", "completion": " fox", "image": as_base64(make_image(i))} for i in range(6)]
    bad: list[dict[str, Any]] = [{"prompt": "a", "completion": "b", "image": place} for place in PLACES]
    bad += [{"prompt": "a", "completion": "b", "image": {"url": place}} for place in PLACES[:3]]
    for place in PLACES[:5]:
        for part in ({"type": "image", "url": place}, {"type": "image_url", "image_url": {"url": place}}):
            messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "b"}]
            bad.append({"messages": messages})
    return good, bad


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events]:
    """The state folder of one run, and the events of the audit hook."""
    folder = tmp_path_factory.mktemp("audit")
    backbone = tiny_vision_backbone(folder / "backbone", "llava")
    good, bad = records()
    rows = [row for pair in zip(bad, [*good, *good], strict=False) for row in pair]
    rows += bad[len(good) * 2 :]
    stream = folder / "stream.jsonl"
    stream.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    config = folder / "config.yaml"
    config.write_bytes(
        orjson.dumps(
            {
                "state": str(folder / "state"),
                "source": {"jsonl": {"path": str(stream)}},
                "stream": {"max_tokens": 128, "batch_tokens": 512, "batch_records": 4},
                "backbone": {"model": str(backbone), "dtype": "float32"},
                "adapter": {"num_heads": 4},
                "snapshot": {"every_records": 8},
                "serve": {"port": 0},
                "log": {"style": "json", "level": "error"},
            }
        )
    )
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.trust.audited", report, stream, "run", "--config", config],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return folder / "state", [(event, what) for event, what in json.loads(report.read_text())]


def test_every_hostile_record_is_a_dead_letter(run: tuple[Path, Events]) -> None:
    """Every other record was learned."""
    state, _ = run
    _, bad = records()
    dead_letters = [orjson.loads(line) for line in (state / "dead_letters.jsonl").read_bytes().splitlines()]
    assert len(dead_letters) == len(bad)
    newest = max(path for path in (state / "snapshots").iterdir() if path.name.isdecimal())
    (row,) = orjson.loads((newest / "manifest.json").read_bytes())["ledger"]
    assert row[2] + row[4] == len(bad)  # there are as many good records among them
    assert row[3] == len(bad)


def test_nothing_is_fetched_started_or_unpickled(run: tuple[Path, Events]) -> None:
    """During the whole life of the process, including its start."""
    _, events = run
    harmless = ("read", "write", "compile", "exec")
    assert [event for event in events if event[0] not in harmless] == []


def test_no_record_causes_code_to_be_compiled(run: tuple[Path, Events]) -> None:
    """Once the stream is open, only imports and a few known places compile or execute code."""
    _, events = run
    compiled = Counter(what for event, what in events if event in ("compile", "exec"))
    assert compiled.keys() <= KNOWN, compiled
    assert max(compiled.values()) < len(PLACES), compiled  # once per renderer, not per record


def test_files_are_written_only_in_the_state_folder(run: tuple[Path, Events]) -> None:
    """And in the directory for temporary files."""
    state, events = run
    allowed = (
        str(state.resolve()),
        os.path.realpath(tempfile.gettempdir()) + os.sep + tempfile.gettempprefix(),
        os.devnull,
    )
    written = {path for event, path in events if event == "write"}
    assert any(path.startswith(allowed[0]) for path in written)
    others = [path for path in written if not path.startswith(allowed)]
    # tempfile writes, and removes, a file of a random name to find out which directory it can use.
    probe = re.compile(re.escape(os.path.realpath(tempfile.gettempdir()) + os.sep) + "[a-z0-9_]{8}")
    assert [path for path in others if not probe.fullmatch(path)] == []


def test_no_place_in_a_record_is_opened(run: tuple[Path, Events]) -> None:
    """Neither by its name nor by a path that it could resolve to."""
    state, events = run
    opened = {path for _, path in events}
    assert str(state.parent / "stream.jsonl") in opened
    assert [path for path in opened if "passwd" in path or "169.254" in path or "://" in path] == []


def test_no_source_trusts_remote_code() -> None:
    """Every mention of `trust_remote_code` sets it to False; ruff has no rule for it."""
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "streamlearn").rglob("*.py")]
    values = [value for source in sources for value in re.findall(r'trust_remote_code"?\s*[=:]\s*(\w+)', source)]
    assert values
    assert set(values) == {"False"}
