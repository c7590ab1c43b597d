"""A Python environment that has the libraries of this one, but not streamlearn.

Its site-packages hold one `.pth` file that names this environment's. The interpreter adds that folder to its path and
does not read the `.pth` files in it, so what is installed in editable form, as streamlearn is by `make`, is not there.
"""

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"


def make_environment(folder: Path) -> Path:
    """Make it, and return its interpreter, which cannot import streamlearn."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    check = "import importlib.util as u, peft; assert u.find_spec('streamlearn') is None, 'streamlearn is installed'"
    subprocess.run([python, "-I", "-W", "ignore", "-c", check], check=True)
    return python


class StockProcess:
    """A script in another environment, asked by lines of JSON; each is answered by one."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process ended: its error is above"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def stock_process(python: Path, script: str, *arguments: str) -> Iterator[StockProcess]:
    """Run one of `scripts`, isolated from this repository and its environment's variables."""
    command = [str(python), "-I", "-W", "ignore", str(SCRIPTS / script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield StockProcess(process)
