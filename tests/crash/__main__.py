"""Thousands of kills, crash states and mutations; prints figures as JSON, and exits with 1 if anything failed.

make crash N=300
python -m tests.crash --kills 10 --files      # without a broker
make crash-states N=10000
make crash-mutations N=10000
make crash-calls
make crash-stops N=100
make crash-ranks N=20
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamlearn.events import configure_logging
from tests.broker import Broker, FileTopics, kafka_home
from tests.crash.calls import SCENARIOS, CannotTraceError, kill_at_calls
from tests.crash.figures import print_figures
from tests.crash.harness import Harness
from tests.crash.mutations import mutate
from tests.crash.states import load_states
from tests.distributed.process import TIMEOUT_S, RanksProcess
from tests.doubles import tiny_backbone

Outcome = tuple[dict[str, Any], bool]
"""Figures, and whether nothing was lost, repeated, changed or undetected."""


def main() -> None:
    """Run the requested test and print its figures; exit with 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kills", type=int, default=300, help="SIGKILLs of a learning daemon (the default test)")
    what.add_argument("--states", type=int, help="states that a power loss may leave, each loaded")
    what.add_argument("--mutations", type=int, help="mutations of the newest snapshot, each to be detected")
    what.add_argument("--at-calls", action="store_true", help="a kill at every system call of a save, prune and append")
    what.add_argument("--stops", type=int, help="SIGTERMs of a learning daemon")
    what.add_argument("--ranks", type=int, help="SIGKILLs of one of a daemon's two processes")
    parser.add_argument("--files", action="store_true", help="kill daemons that read a file, instead of a topic")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    configure_logging("critical")  # otherwise the store logs each damaged snapshot
    with tempfile.TemporaryDirectory() as name:
        figures, clean = _requested(given, Path(name))()
    print_figures(figures)
    sys.exit(0 if clean else 1)


def _requested(given: argparse.Namespace, folder: Path) -> Callable[[], Outcome]:
    if given.states:
        return lambda: load_states(given.states, given.seed, folder)
    if given.mutations:
        return lambda: _outcome(mutate(given.mutations, given.seed, folder))
    if given.at_calls:
        return lambda: _at_calls(folder)
    return lambda: _end_daemons(given, folder)


def _outcome(tally: Any) -> Outcome:
    return tally.to_json(), tally.clean


def _at_calls(folder: Path) -> Outcome:
    try:
        return _outcome(kill_at_calls(folder, SCENARIOS))
    except CannotTraceError as error:
        sys.exit(f"skipped: {error}")


def _end_daemons(given: argparse.Namespace, folder: Path) -> Outcome:
    (folder / "backbone").mkdir()
    (folder / "broker").mkdir()
    backbone = tiny_backbone(folder / "backbone")
    if given.files:
        tally = Harness(FileTopics(folder / "broker"), backbone, folder, given.seed).kill(given.kills)
        return {"seed": given.seed, **tally.to_json()}, tally.clean
    home = kafka_home()
    if home is None:
        sys.exit(
            "no Apache Kafka found: set KAFKA_HOME to an unpacked distribution, put one into ../shared/kafka, or add "
            "--files"
        )
    broker = Broker(home, folder / "broker")
    broker.start()
    try:
        if given.ranks:
            return _kill_ranks(broker, backbone, folder, given)
        harness = Harness(broker, backbone, folder, given.seed)
        tally = harness.stop(given.stops) if given.stops else harness.kill(given.kills)
    finally:
        broker.stop()
    return {"seed": given.seed, **tally.to_json()}, tally.clean


def _kill_ranks(broker: Broker, backbone: Path, folder: Path, given: argparse.Namespace) -> Outcome:
    """Runs in two processes, of which either is killed; all of both must end in time."""
    runs: list[RanksProcess] = []

    def process(folder: Path, config: dict[str, Any]) -> RanksProcess:
        runs.append(RanksProcess(folder, config, seed=given.seed + len(runs)))
        return runs[-1]

    tally = Harness(broker, backbone, folder, given.seed, process=process).kill(given.ranks)
    killed = Counter(rank for process in runs for rank in process.killed)
    seconds = [second for process in runs for second in process.seconds_to_end]
    figures = {
        "seed": given.seed,
        **tally.to_json(),
        "kills_by_rank": {str(rank): count for rank, count in sorted(killed.items())},
        "slowest_end_s": round(max(seconds), 2),
        "timeout_s": TIMEOUT_S,
    }
    return figures, tally.clean


if __name__ == "__main__":
    main()
