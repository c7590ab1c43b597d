"""What a start checks, in which order, and that a refused start leaves nothing open."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.daemon import without_http
from streamlearn.daemon.build import Components, decoding_thread
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import ConfigError, SourceError, StateLockedError
from streamlearn.settings import DeadLetterSettings, Settings
from streamlearn.snapshot.files import StateLock
from tests.daemon.test_daemon import backbone, make, records

__all__ = ["backbone", "make"]


def test_an_adapter_that_does_not_fit_is_refused_before_the_state_folder_is_made(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """Nothing was touched yet."""
    settings = make(records(4))
    settings = settings.model_copy(update={"adapter": settings.adapter.model_copy(update={"num_heads": 5})})
    with pytest.raises(ConfigError, match=r"adapter\.num_heads: must divide"):
        Components(settings)
    assert not settings.state.exists()


def test_a_refused_start_releases_the_state_folder(make: Callable[..., Settings]) -> None:
    """The next daemon can take it."""
    settings = make(records(4))
    assert settings.source.jsonl is not None
    settings.source.jsonl.path.unlink()
    with pytest.raises((SourceError, ConfigError)):
        Components(settings)
    StateLock(settings.state).release()


def test_a_file_of_dead_letters_has_one_daemon(make: Callable[..., Settings], tmp_path: Path) -> None:
    """Whatever the name by which another one reaches it."""
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "dead.jsonl")
    first, second = (
        make(records(4)).model_copy(
            update={"state": tmp_path / state, "dead_letters": DeadLetterSettings(file=tmp_path / file)}
        )
        for state, file in (("one", "dead.jsonl"), ("other", "link.jsonl"))
    )
    message = rf"dead\.jsonl must be used by one daemon only, .* process {os.getpid()}: stop"
    with closing(Components(first)), pytest.raises(StateLockedError, match=message):
        Components(second)
    Components(second).close()


def test_closing_twice_is_safe(make: Callable[..., Settings]) -> None:
    """The second call finds nothing to do."""
    components = Components(make(records(4)))
    components.close()
    components.close()


def test_numpy_computes_on_one_thread_while_the_loop_runs(make: Callable[..., Settings]) -> None:
    """Whatever the process had before. The threads of training are not limited by it."""

    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    class Watching(Daemon):
        def start(self) -> None:
            seen.append(threads())
            super().start()

    seen: list[set[int]] = []
    with threadpool_limits(2, user_api="blas"), closing(Components(make(records(4)))) as components:
        Watching(components, *without_http()).run()
        assert [*seen, threads()] == [{1}, {2}]


def test_a_stop_waits_for_no_record_that_only_waits_to_be_decoded() -> None:
    """Hundreds of images may be read ahead; the one under way is finished."""
    begun, done = Event(), list[int]()

    def decode(number: int) -> None:
        begun.set()
        time.sleep(0.1)
        done.append(number)

    with decoding_thread() as executor:
        for number in range(20):
            executor.submit(decode, number)
        begun.wait()
    assert done in ([0], [0, 1])
