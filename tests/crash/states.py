"""Loads of thousands of states that a power loss may leave."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

from tests.snapshot.crash_disk import CrashDisk
from tests.snapshot.histories import a_random_history, fault

SAVE_TOO_EVERY = 8
SAMPLED = 0.3
"""Share of a history's states that are loaded, so that there are more histories."""


def load_states(number: int, seed: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Load `number` different states; each must hold the old snapshot or the new one, and the matching journal.

    Every history is random: number, distance and size of the snapshots, replacements, prunes, length of the journal.
    """
    seen: set[int] = set()
    faults: list[str] = []
    started, histories, sampler = time.monotonic(), 0, random.Random(seed)
    while len(seen) < number:
        draw = random.Random(f"{seed} {histories}")
        (folder / "history").mkdir()
        for tree, allowed in a_random_history(CrashDisk(folder / "history"), draw):
            if sampler.random() > SAMPLED or hash(tree) in seen:
                continue
            seen.add(hash(tree))
            wrong = fault(tree, allowed, folder / "disk", save_too=len(seen) % SAVE_TOO_EVERY == 0)
            faults += [f"history {histories}: {wrong}"] if wrong else []
            shutil.rmtree(folder / "disk")
            if len(seen) == number:
                break
        shutil.rmtree(folder / "history")
        histories += 1
    figures = {
        "seed": seed,
        "states": len(seen),
        "lives": histories,
        "faults": faults,
        "seconds": round(time.monotonic() - started),
    }
    return figures, not faults
