"""Measurements in processes of their own, so that the peak memory of one is not that of another."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from streamlearn.errors import StreamlearnError

ERROR_LINES = 20
"""Lines of a failed process's output that its error quotes: the end of its traceback."""


class MeasurementError(StreamlearnError):
    """A process that measures failed; run it again once the cause, which the message quotes, is gone."""


def in_own_process(module: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m MODULE OPTIONS`, options as JSON, and return the JSON object on the last line that it prints.

    Raises:
        MeasurementError: the process failed.
    """
    command = [sys.executable, "-m", module, orjson.dumps(options).decode()]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        last = "\n".join(done.stderr.decode(errors="replace").splitlines()[-ERROR_LINES:])
        raise MeasurementError(f"{module} {dict(options)}: exit code {done.returncode}\n{last}")
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result
