"""`make crash N=300`: many kills, and their figures as JSON on standard output."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from tests.broker import Broker, kafka_home
from tests.crash.harness import Harness
from tests.doubles import tiny_backbone

LOAD = (
    "import sys; from streamlearn.backbone.load import load, outline; from streamlearn.settings import BackboneSettings"
)
LOADS = 5


def main() -> None:
    """Kill, count, print; exit 1 when anything was lost, repeated or changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
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
    figures = {"seed": given.seed, "backbone_load_s": round(load_s, 2), **tally.to_json()}
    sys.stdout.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
    sys.exit(0 if tally.clean else 1)


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
