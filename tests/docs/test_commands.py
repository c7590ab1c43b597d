"""Every command block that a document marks as runnable runs as it stands there.

    <!-- run -->            on its own
    <!-- run: daemon -->    while `streamlearn run --config configs/quickstart.yaml` runs
    <!-- run: broker -->    with a real Apache Kafka

The mark is a line of its own directly before the fence. A block is run by `bash -euo pipefail` from the repository's
root, with this environment's commands first on PATH. What a document must name although it differs from machine to
machine is replaced before: addresses and the state folder, see `Place.replaced`.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.broker import Broker, needed_kafka
from tests.docs.markdown import KINDS, Block, blocks, documents
from tests.docs.place import Place, started

BLOCKS = [block for document in documents() for block in blocks(document)]
LIMIT_S = 300.0  # a start is 10 s on two idle cores; CI's may be busy


def of_kind(kind: str) -> list[Block]:
    """The blocks of one kind."""
    return [block for block in BLOCKS if block.kind == kind]


def run(script: str, environment: Mapping[str, str], folder: Path) -> None:
    """Run a block; it must exit 0 in time."""
    log = folder / "output.txt"
    with started(["bash", "-euo", "pipefail", "-c", script], environment, log) as process:
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
    output = log.read_text(encoding="utf-8", errors="replace")
    assert code == 0, f"exit code {code}, None is more than {LIMIT_S:g} s:\n{script}\n{output[-4000:]}"


def test_every_mark_is_one_that_is_run() -> None:
    """A mistyped mark would otherwise be a block that nothing runs; each is a shell block."""
    assert [str(block) for block in BLOCKS if block.kind not in KINDS or block.language not in ("bash", "sh")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_blocks_of_each_kind(kind: str) -> None:
    """So that a change of the documents cannot leave a test with nothing to run."""
    assert of_kind(kind)


@pytest.mark.parametrize("block", of_kind("run"), ids=str)
def test_commands_run(block: Block, place: Place, tmp_path: Path) -> None:
    """On their own."""
    run(place.replaced(block.script), place.environment, tmp_path)


@pytest.mark.parametrize("block", of_kind("run: daemon"), ids=str)
def test_commands_run_beside_a_daemon(block: Block, daemon: Place, tmp_path: Path) -> None:
    """That answers on its port and holds its state folder."""
    run(daemon.replaced(block.script), daemon.environment, tmp_path)


@pytest.mark.broker
@pytest.mark.parametrize("block", of_kind("run: broker"), ids=str)
def test_commands_run_with_a_broker(block: Block, place: Place, broker: Broker, tmp_path: Path) -> None:
    """Against a real Apache Kafka."""
    kafka = {
        "KAFKA_HOME": str(needed_kafka()),
        "KAFKA_HEAP_OPTS": "-Xmx128m",
        "LOG_DIR": str(tmp_path),
        "STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS": broker.servers,
    }
    run(place.replaced(block.script, broker.servers), {**place.environment, **kafka}, tmp_path)
