"""The OpenAPI document matches the server: schemathesis sends described and undescribed requests."""

import subprocess
import sys
from pathlib import Path

from .doubles import AUTHORIZED, Daemon, row

EXAMPLES = 10  # per operation; 300 take a minute and find nothing more


def test_every_described_request_is_answered_as_described(daemon: Daemon, tmp_path: Path) -> None:
    daemon.rows = (row(40), row(41))
    program = Path(sys.executable).with_name("st")
    [(name, value)] = AUTHORIZED.items()
    command = [str(program), "run", f"http://127.0.0.1:{daemon.server.port}/openapi.json", "-H", f"{name}: {value}"]
    options = ["--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 25" in done.stdout
