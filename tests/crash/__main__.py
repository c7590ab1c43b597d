"""Many kills, or many crash states of the snapshot protocol; figures as JSON on standard output.

make crash N=300
make crash-states N=10000
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from streamlearn.events import configure_logging
from tests.broker import Broker, kafka_home
from tests.crash.harness import Harness
from tests.doubles import tiny_backbone
from tests.snapshot.crash_disk import CrashDisk, Tree
from tests.snapshot.test_crash import a_life, fault

LOAD = (
    "import sys; from streamlearn.backbone.load import load, outline; from streamlearn.settings import BackboneSettings"
)
LOADS = 5


def main() -> None:
    """Kill, count, print; exit 1 when anything was lost, repeated or changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--states", type=int, help="crash states to load instead")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    configure_logging("error")
    if given.states:
        tell(load_states(given.states, given.seed))
        return
    home = kafka_home()
    if home is None:
        parser.error("KAFKA_HOME must name a Kafka, or one must lie in ../shared/kafka")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "backbone").mkdir()
        (folder / "broker").mkdir()
        backbone = tiny_backbone(folder / "backbone")
        broker = Broker(home, folder / "broker")
        broker.start()
        try:
            load_s = loading_time(backbone)
            tally = Harness(broker, backbone, folder, given.seed).kill(given.kills)
        finally:
            broker.stop()
    tell({"seed": given.seed, "backbone_load_s": round(load_s, 2), **tally.to_json()})
    sys.exit(0 if tally.clean else 1)


def tell(figures: dict[str, Any]) -> None:
    """On standard output."""
    sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def load_states(number: int, seed: int) -> dict[str, Any]:
    """Load `number` different legal states after a power loss; each must hold the old snapshot or the new one, whole.

    Lives are the same, what a power loss leaves of them is drawn anew for each.
    """
    seen: set[Tree] = set()
    faults: list[str] = []
    started, life = time.monotonic(), 0
    while len(seen) < number:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "state").mkdir()
            for tree, allowed in a_life(CrashDisk(folder / "state"), seed=seed + life, most=32, mixed=8):
                if tree in seen or len(seen) >= number:
                    continue
                seen.add(tree)
                wrong = fault(tree, allowed, folder / "disk", save_too=len(seen) % 8 == 0)
                faults += [wrong] if wrong else []
                shutil.rmtree(folder / "disk")
        life += 1
    return {
        "seed": seed,
        "states": len(seen),
        "lives": life,
        "faults": faults,
        "seconds": round(time.monotonic() - started),
    }


def loading_time(backbone: Path) -> float:
    """Seconds in which a fresh process has the backbone and nothing else; median of some."""
    work = f"s = BackboneSettings(model={str(backbone)!r}, dtype='float32'); load(s, outline(s))"
    taken = []
    for _ in range(LOADS):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", f"{LOAD}; {work}"], check=True, capture_output=True)
        taken.append(time.monotonic() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
