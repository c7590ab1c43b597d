"""The linger expires after a quiet time, measured with a clock that tests set."""

from streamlearn.stream.intake import Linger


class SetClock:
    """Shows what a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_expires_when_nothing_came_for_its_time() -> None:
    """Counted from the first empty poll; without a poll nothing has been waited for."""
    clock = SetClock()
    linger = Linger(10.0, clock)
    clock.now += 1000.0
    assert not linger.expired
    linger.observe_poll(0)
    clock.now += 9.5
    linger.observe_poll(0)
    assert not linger.expired
    clock.now += 0.5
    assert linger.expired


def test_a_record_begins_it_anew() -> None:
    """However long the daemon is busy before it polls again."""
    clock = SetClock()
    linger = Linger(10.0, clock)
    linger.observe_poll(0)
    clock.now += 9.0
    linger.observe_poll(1)
    clock.now += 50.0
    linger.observe_poll(0)
    assert not linger.expired
    clock.now += 10.0
    assert linger.expired
    linger.restart()
    assert not linger.expired


def test_without_a_time_it_never_expires() -> None:
    """`stream.linger_s: null`."""
    clock = SetClock()
    linger = Linger(None, clock)
    linger.observe_poll(0)
    clock.now += 1e9
    assert not linger.expired
