"""A steady rate on a clock that the tests move."""

import threading

from connectors.pacer import Pacer


class Clock:
    """Moves only by waiting."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def due_times(rate: float | None, number: int, pause_after: int = -1, pause_s: float = 0.0) -> list[float]:
    clock = Clock()
    pacer = Pacer(rate, threading.Event(), clock=clock, wait=clock.wait)
    times = []
    for each in range(number):
        assert pacer.wait()
        times.append(round(clock.now - 100.0, 6))
        clock.now += pause_s if each == pause_after else 0.0
    return times


def test_records_are_due_at_equal_distances() -> None:
    """The first at once."""
    assert due_times(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_short_delay_is_caught_up_with() -> None:
    assert due_times(4.0, 6, pause_after=1, pause_s=0.6) == [0.0, 0.25, 0.85, 0.85, 1.0, 1.25]


def test_no_burst_follows_a_long_delay() -> None:
    """The schedule begins anew."""
    assert due_times(4.0, 5, pause_after=1, pause_s=60.0) == [0.0, 0.25, 60.25, 60.5, 60.75]


def test_without_a_rate_nothing_waits() -> None:
    assert due_times(None, 3) == [0.0, 0.0, 0.0]


def test_a_stop_ends_the_wait() -> None:
    """Also one that is under way."""
    stop = threading.Event()
    pacer = Pacer(0.001, stop)
    assert pacer.wait()
    threading.Timer(0.05, stop.set).start()
    assert not pacer.wait()
    assert not Pacer(None, stop).wait()
