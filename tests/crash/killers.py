"""A daemon that reads a file with a record that crashes it, restarted until a process reaches the end.

    python -m tests.crash.killers CONFIG.json decoding|training

Each process is a child of this one, forked after the imports. It calls `abort` when it decodes, or trains on, a
record with MAGIC. Prints the exit codes as JSON.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import orjson

import streamlearn.learner.learner as learner_module
from streamlearn.board import Board, Clock
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.events import configure_logging
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.loss import PackedBatch, PackedLoss, packed_loss
from streamlearn.settings import Settings
from streamlearn.status import Phase, Status
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example, Record

MAGIC = b"abracadabra"
MAGIC_TOKEN = 7
"""A token that no text of the stream contains; a record of token ids contains it."""
MAX_PROCESSES = 8


def crashing_decode(decoder: Decoder, record: Record, *, decode: Any = Decoder.decode) -> Example:
    """Decode a record, or abort."""
    if MAGIC in (record.value or b""):
        os.abort()
    example: Example = decode(decoder, record)
    return example


def crashing_loss(model: Any, packed: PackedBatch) -> PackedLoss:
    """Compute the loss, or abort."""
    if (packed.input_ids == MAGIC_TOKEN).any():
        os.abort()
    return packed_loss(model, packed)


def run(settings: Settings, where: str) -> None:
    """Run one daemon to the end of the file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if where == "decoding":
        Decoder.decode = crashing_decode  # type: ignore[method-assign,assignment]
    else:
        learner_module.packed_loss = crashing_loss  # type: ignore[attr-defined]
    components = Components(settings)
    Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1)).run()
    components.close()


def main() -> None:
    """Run daemons until one exits with 0."""
    settings = Settings.model_validate(orjson.loads(Path(sys.argv[1]).read_bytes()))
    configure_logging("error")
    exit_codes: list[int] = []
    while len(exit_codes) < MAX_PROCESSES and exit_codes[-1:] != [0]:
        child = os.fork()
        if child == 0:
            run(settings, sys.argv[2])
            os._exit(0)
        exit_codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.write(orjson.dumps(exit_codes).decode())


if __name__ == "__main__":
    main()
