"""Run `streamlearn` under an audit hook: `python -m tests.trust.audited REPORT STREAM ARGUMENT...` reports events.

Events below an import on the stack are left out: an import compiles and runs code, and so does a library while it is
imported. `compile` and `exec` are recorded only after the stream was opened: a start may build functions, a record may
not.
"""

import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

REPORT, STREAM = sys.argv[1:3]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
seen: list[list[str]] = []
reading = False


def importing() -> bool:
    """Whether this thread is importing a module."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def caller() -> str:
    """File and function that raised the event."""
    code = sys._getframe(2).f_code
    return f"{Path(code.co_filename).name}:{code.co_name}"


def record(event: str, args: tuple[Any, ...]) -> None:
    """Record what a daemon must not do, and every file that it opens."""
    global reading  # noqa: PLW0603 - a hook has no other place for its state
    if event == "open":
        path, mode, flags = args
        reading = reading or str(path) == STREAM
        writes = bool(flags & WRITES) if isinstance(flags, int) else "r" not in str(mode)
        if isinstance(path, str | bytes | os.PathLike):
            seen.append(["write" if writes else "read", os.path.realpath(os.fsdecode(path))])
    elif event in ("compile", "exec"):
        if reading and not importing():
            code = args[0] if isinstance(args[0], CodeType) else None
            seen.append([event, f"{code.co_filename if code else args[-1]} by {caller()}"])
    elif event in ("pickle.find_class", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        seen.append([event, repr(args[1:] if event.startswith("socket.connect") else args)])
    elif event in ("os.exec", "os.posix_spawn", "os.fork", "urllib.Request", "marshal.loads") and not importing():
        seen.append([event, repr(args)[:200]])


if __name__ == "__main__":
    from streamlearn.cli.main import main

    sys.addaudithook(record)
    sys.argv = ["streamlearn", *sys.argv[3:]]
    try:
        main()
    finally:
        found = list(seen)
        Path(REPORT).write_text(json.dumps(found))
