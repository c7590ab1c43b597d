"""The daemon's speed over that of bare training steps on the same batches in memory.

The daemon reads the bundled sample from its file, decodes, batches, writes its journal and takes snapshots.
"""

import tempfile
import time
from pathlib import Path

from streamlearn.bench.sample import SAMPLE
from streamlearn.bench.stream_batches import stream_batches
from streamlearn.jobs.queue import JobQueue
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.settings import JsonlSettings, LogSettings, Settings, SourceSettings
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status


def daemon_and_loop(rounds: int) -> tuple[list[float], list[float]]:
    """Return the tokens per second of the daemon and of bare steps over the same batches, measured in turns."""
    pairs = [(daemon_speed(), loop_speed()) for _ in range(max(3, rounds // 2))]
    return [daemon for daemon, _ in pairs], [loop for _, loop in pairs]


def daemon_speed() -> float:
    """Run the daemon over the bundled sample; the time excludes start-up and includes the final snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_settings(Path(folder)))
        board = Board(Status(Phase.STARTING), Clock())
        started = time.perf_counter()
        Daemon(components, board, JobQueue(1)).run()
        seconds = time.perf_counter() - started
        tokens = components.state.tokens
        components.close()
    return tokens / seconds


def loop_speed() -> float:
    """Run the training steps only; the time excludes decoding and batching."""
    with tempfile.TemporaryDirectory() as folder:
        components = Components(_settings(Path(folder)))
        batches = list(stream_batches(components))
        started = time.perf_counter()
        for batch in batches:
            components.learner.step(batch.examples)
        seconds = time.perf_counter() - started
        components.close()
    return sum(batch.num_tokens for batch in batches) / seconds


def _settings(folder: Path) -> Settings:
    return Settings(
        state=folder,
        source=SourceSettings(jsonl=JsonlSettings(path=SAMPLE)),
        log=LogSettings(level="error"),
    )
