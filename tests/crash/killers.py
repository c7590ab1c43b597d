"""A daemon over a file with a record that kills its process, life after life until one lives to the end.

    python -m tests.crash.killers CONFIG.json decoding|training

Every life is a child of this process, forked after the imports, and dies by `abort` when it decodes, or trains on, a
record that holds the word MAGIC. Prints how each ended, as JSON.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import orjson

import streamlearn.learner.learner as learner_module
from streamlearn.events import configure_logging
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.loss import PackedLoss, packed_loss
from streamlearn.learner.packing import PackedBatch
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.settings import Settings
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status
from streamlearn.stream.decode import Decoder, Example
from streamlearn.stream.record import Record

MAGIC = b"abracadabra"
MAGIC_TOKEN = 7
"""Stands in no text of the stream: a record of token ids brings it."""
MOST_LIVES = 8


def deadly_decode(decoder: Decoder, record: Record, *, decode: Any = Decoder.decode) -> Example:
    """Decode, or die."""
    if MAGIC in (record.value or b""):
        os.abort()
    example: Example = decode(decoder, record)
    return example


def deadly_loss(model: Any, packed: PackedBatch) -> PackedLoss:
    """A forward pass, or death."""
    if (packed.input_ids == MAGIC_TOKEN).any():
        os.abort()
    return packed_loss(model, packed)


def live(settings: Settings, where: str) -> None:
    """One life."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if where == "decoding":
        Decoder.decode = deadly_decode  # type: ignore[method-assign,assignment]
    else:
        learner_module.packed_loss = deadly_loss  # type: ignore[attr-defined]
    components = Components(settings)
    Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1)).run()
    components.close()


def main() -> None:
    """See above."""
    settings = Settings.model_validate(orjson.loads(Path(sys.argv[1]).read_bytes()))
    configure_logging("error")
    ends: list[int] = []
    while len(ends) < MOST_LIVES and ends[-1:] != [0]:
        child = os.fork()
        if child == 0:
            live(settings, sys.argv[2])
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.write(orjson.dumps(ends).decode())


if __name__ == "__main__":
    main()
