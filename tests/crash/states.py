"""Legal states after a power loss by the thousand, each loaded."""

import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

from tests.snapshot.crash_disk import CrashDisk, Tree
from tests.snapshot.histories import a_drawn_life, fault

SAVE_TOO_EVERY = 8
TAKEN = 0.3
"""Share of a life's states that are loaded, so that there are more lives."""


def load_states(number: int, seed: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Load `number` different states; each must hold the old snapshot or the new one, whole, and so the journal.

    Every life is drawn anew: number, distance and size of the snapshots, replacements, prunings, length of the journal.
    """
    seen: set[int] = set()
    shapes: set[int] = set()
    faults: list[str] = []
    started, lives, sieve = time.monotonic(), 0, random.Random(seed)
    while len(seen) < number:
        draw = random.Random(f"{seed} {lives}")
        (folder / "life").mkdir()
        for tree, allowed in a_drawn_life(CrashDisk(folder / "life"), draw):
            if sieve.random() > TAKEN or hash(tree) in seen:
                continue
            seen.add(hash(tree))
            shapes.add(hash(shape(tree)))
            wrong = fault(tree, allowed, folder / "disk", save_too=len(seen) % SAVE_TOO_EVERY == 0)
            faults += [f"life {lives}: {wrong}"] if wrong else []
            shutil.rmtree(folder / "disk")
            if len(seen) == number:
                break
        shutil.rmtree(folder / "life")
        lives += 1
    figures = {
        "seed": seed,
        "states": len(seen),
        "shapes": len(shapes),
        "lives": lives,
        "faults": faults,
        "seconds": round(time.monotonic() - started),
    }
    return figures, not faults


def shape(tree: Tree) -> tuple[tuple[str, str], ...]:
    """Names and what became of each file, whatever the numbers of the steps and the bytes are."""
    numbers = sorted({number for name, _ in tree for number in re.findall(r"\d{8}", name)})
    ranks = {number: f"<{rank}>" for rank, number in enumerate(numbers)}
    return tuple(
        (re.sub(r"\d{8}", lambda found: ranks[found[0]], name), _fate(name, content)) for name, content in tree
    )


def _fate(name: str, content: bytes | None) -> str:
    if content is None:
        return "folder"
    if not content.strip(b"\0"):
        return "zeros" if content else "empty"
    return "torn" if name.endswith((".json", ".jsonl")) and not content.endswith((b"\n", b"}")) else "some"
