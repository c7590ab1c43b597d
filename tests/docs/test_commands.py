"""Every command block that a document marks as runnable runs as it stands there.

    <!-- run -->            on its own
    <!-- run: daemon -->    while `streamlearn run --config configs/quickstart.yaml` runs
    <!-- run: broker -->    with a real Apache Kafka

A block is run by `bash -euo pipefail` from the repository's root, with this environment's commands first on PATH.
Addresses and the state folder are replaced before, see `Place.replaced`.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.broker import Broker, needed_kafka
from tests.docs.markdown import Block, blocks, documents
from tests.docs.place import Place, started

BLOCKS = [block for document in documents() for block in blocks(document)]
LIMIT_S = 300.0  # a start is 10 s on two idle cores; CI's may be busy


def of_kind(kind: str) -> list[Block]:
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


def test_every_marked_block_is_one_that_is_run() -> None:
    """A mistyped mark would otherwise be a block that nothing runs; there is one of each kind."""
    assert {block.kind for block in BLOCKS} == {"run", "run: daemon", "run: broker"}
    assert {block.language for block in BLOCKS} == {"bash"}


@pytest.mark.parametrize("block", of_kind("run"), ids=str)
def test_commands_run(block: Block, place: Place, tmp_path: Path) -> None:
    run(place.replaced(block.script), place.environment, tmp_path)


@pytest.mark.parametrize("block", of_kind("run: daemon"), ids=str)
def test_commands_run_beside_a_daemon(block: Block, daemon: Place, tmp_path: Path) -> None:
    run(daemon.replaced(block.script), daemon.environment, tmp_path)


@pytest.mark.broker
@pytest.mark.parametrize("block", of_kind("run: broker"), ids=str)
def test_commands_run_with_a_broker(block: Block, place: Place, broker: Broker, tmp_path: Path) -> None:
    kafka = {
        "KAFKA_HOME": str(needed_kafka()),
        "KAFKA_HEAP_OPTS": "-Xmx128m",
        "LOG_DIR": str(tmp_path),
        "STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS": broker.servers,
    }
    run(place.replaced(block.script, broker.servers), {**place.environment, **kafka}, tmp_path)
