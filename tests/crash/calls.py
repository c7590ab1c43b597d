"""SIGKILL at every system call of the snapshot protocol, with the real interpreter and the real file system.

strace delivers the signal when a chosen call is entered for the n-th time, so the call is not made. A
forked child has all imports and waits until strace is attached; n grows until a child survives. After each
kill a start must find the old snapshot or the new one, bit for bit, and another save must work.
"""

import os
import shutil
import signal
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamlearn.snapshot.journal import Journal
from tests.snapshot.histories import JOURNAL, LATER, Allowed, Lines, State, append_batch, open_store, start_on
from tests.snapshot.kit import save

CALLS = (
    "openat", "mkdir", "mkdirat", "write", "pwrite64", "writev", "ftruncate", "truncate", "fallocate", "fsync",
    "fdatasync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir",
)  # fmt: skip
"""All calls of this protocol that can change a disk; which of them are made depends on Python and safetensors."""
CHILD_S = 60.0
"""Maximum run time of a child."""


Found = tuple[State, Lines]
"""Newest snapshot and journal."""


class CannotTraceError(Exception):
    """strace is missing, or may not attach to our processes."""


class Scenario(NamedTuple):
    """One action of a daemon on a prepared folder, and what is to be found before and after it."""

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], object]
    before: Found
    after: Found
    damaged: bool = False


@dataclass
class Tally:
    """Counts and faults."""

    kills: Counter[str] = field(default_factory=Counter)
    by_scenario: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "kills": self.kills.total(),
            "kills_by_call": dict(self.kills.most_common()),
            "kills_by_scenario": dict(self.by_scenario),
            "old_loaded": self.loaded["old"],
            "new_loaded": self.loaded["new"],
            "neither_changed": self.loaded["same"],
            "faults": self.faults,
            "seconds": round(self.seconds),
        }

    @property
    def clean(self) -> bool:
        """Whether the old or the new state was found after every kill."""
        return not self.faults and self.kills.total() > 0


def kill_at_calls(folder: Path, scenarios: Iterable[Scenario], calls: Sequence[str] = CALLS) -> Tally:
    """Kill at each call of each scenario.

    Raises:
        CannotTraceError: strace is missing or may not attach.
    """
    tally, started = Tally(), time.monotonic()
    for scenario in scenarios:
        template, root = folder / f"{scenario.name}-template", folder / scenario.name
        template.mkdir()
        scenario.prepare(template)
        for call in calls:
            number, killed = 0, True
            while killed:
                number += 1
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(template, root)
                killed = run_and_kill(lambda scenario=scenario, root=root: scenario.act(root), call, number)  # type: ignore[misc]
                _check(tally, scenario, root, f"{scenario.name}, {call} {number}", survived=not killed)
                tally.kills[call] += killed
                tally.by_scenario[scenario.name] += killed
    tally.kills = +tally.kills
    tally.seconds = time.monotonic() - started
    return tally


def _check(tally: Tally, scenario: Scenario, root: Path, where: str, *, survived: bool) -> None:
    """Start after a kill, or after the undisturbed action, and count what was found."""
    (old, old_lines), (new, new_lines) = scenario.before, scenario.after
    allowed = Allowed(frozenset({old, new}), frozenset({old_lines, new_lines}), scenario.damaged)
    start = start_on(root, allowed, save_too=True)
    found, wrong = (start.state, start.lines), start.wrong
    if wrong is None and found not in (scenario.before, scenario.after):
        wrong = f"found {found}"
    if wrong is None and survived and found != scenario.after:
        wrong = f"done, and found {found}"
    tally.faults += [f"{where}: {wrong}"] if wrong else []
    if not survived:
        kind = "same" if scenario.before == scenario.after else "new" if found == scenario.after else "old"
        tally.loaded[kind] += 1


def run_and_kill(act: Callable[[], object], call: str, number: int) -> bool:
    """Run `act` in a child that is killed when it enters `call` for the n-th time; return whether it was killed.

    Raises:
        CannotTraceError: strace is missing or may not attach.
    """
    if shutil.which("strace") is None:
        raise CannotTraceError("strace is not on PATH")
    waiting, go = os.pipe()
    child = _fork(act, waiting, go)
    os.close(waiting)
    chosen = ["-e", f"trace=?{call}", "-e", f"inject=?{call}:signal=SIGKILL:when={number}"]
    command = ["strace", "-f", "-o", os.devnull, "-p", str(child), *chosen]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        line = strace.stderr.readline()
        if "attached" not in line:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(go)
            raise CannotTraceError(f"strace may not attach to a process: {line.strip()}")
        os.write(go, b"g")
        os.close(go)
        code = _wait(child)
    assert code in (0, -signal.SIGKILL), f"{call} {number}: the child ended with {code}"
    return code != 0


def _fork(act: Callable[[], object], waiting: int, go: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, since 3.12: the child needs none
        child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.close(go)
        if os.read(waiting, 1):
            act()
            code = 0
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    deadline = time.monotonic() + CHILD_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child was still running after {CHILD_S:.0f} s")
        time.sleep(0.002)


def _saved(*steps: int) -> Callable[[Path], None]:
    def prepare(root: Path) -> None:
        for step in steps:
            save(open_store(root), step)
        with closing(Journal(root / JOURNAL)) as journal:
            for step in range(1, max(steps) + 3):
                append_batch(journal, step)

    return prepare


def _half_replaced(root: Path) -> None:
    """A crash between the two renames of a replacement, an incomplete save and an incomplete prune."""
    _saved(1, 2)(root)
    folder = root / "snapshots"
    shutil.copytree(folder / "00000001", folder / ".pruned-00000000")
    shutil.copytree(folder / "00000002" / "adapter", folder / ".staging-00000003" / "adapter")
    (folder / "00000002").rename(folder / ".replaced-00000002")


def _newest_damaged(root: Path) -> None:
    _saved(1, 2)(root)
    (root / "snapshots" / "00000002" / "state.safetensors").write_bytes(b"")


def _torn(root: Path) -> None:
    _saved(1)(root)
    with (root / JOURNAL).open("ab") as journal:
        journal.write(b'{"step":4,"runs":[["orders"')


def _journalled(do: Callable[[Journal], None]) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        with closing(Journal(root / JOURNAL)) as journal:
            do(journal)

    return act


def _scenario(
    name: str,
    prepare: Callable[[Path], None],
    act: Callable[[Path], object],
    before: Found,
    after: Found | None = None,
    *,
    damaged: bool = False,
) -> Scenario:
    """By default the action does not change what a start finds."""
    return Scenario(name, prepare, act, before, after or before, damaged)


def _nothing(root: Path) -> None:
    """An empty state folder."""


def _newest(root: Path) -> None:
    open_store(root).newest()


FOUR = (1, 2, 3, 4)
SAVE = _scenario("save", _saved(1, 2), lambda root: save(open_store(root), 3), ((2, 8), FOUR), ((3, 12), FOUR))
REPLACE = _scenario(
    "replace",
    _saved(1, 2),
    lambda root: save(open_store(root), 2, position=LATER),
    ((2, 8), FOUR),
    ((2, 99), FOUR),
)
APPEND = _journalled(lambda journal: append_batch(journal, 4))
SCENARIOS = (
    _scenario("first save", _nothing, lambda root: save(open_store(root), 1), (None, ()), ((1, 4), ())),
    SAVE,
    REPLACE,
    _scenario("prune", _saved(1, 2, 3), lambda root: open_store(root).prune(1), ((3, 12), (*FOUR, 5))),
    _scenario("mend", _half_replaced, _newest, ((2, 8), FOUR)),
    _scenario("fall back", _newest_damaged, _newest, ((1, 4), FOUR), damaged=True),
    _scenario(
        "journal, first line",
        _nothing,
        _journalled(lambda journal: append_batch(journal, 1)),
        (None, ()),
        (None, (1,)),
    ),
    _scenario("journal, append", _saved(1), APPEND, ((1, 4), (1, 2, 3)), ((1, 4), FOUR)),
    _scenario("journal, append to a torn one", _torn, APPEND, ((1, 4), (1, 2, 3)), ((1, 4), FOUR)),
    _scenario(
        "journal, truncate",
        _saved(1, 2),
        _journalled(lambda journal: journal.truncate(before_step=2)),
        ((2, 8), FOUR),
        ((2, 8), (2, 3, 4)),
    ),
    _scenario(
        "journal, rewind",
        _saved(1, 2),
        _journalled(lambda journal: journal.rewind(to_step=2)),
        ((2, 8), FOUR),
        ((2, 8), (1, 2)),
    ),
)
