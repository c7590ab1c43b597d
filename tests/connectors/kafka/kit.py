"""Settings and a clock for tests of Kafka code without a broker."""

from streamlearn.settings import KafkaSettings


def settings(**overrides: object) -> KafkaSettings:
    """Settings for a broker that does not exist."""
    values = {"bootstrap_servers": "127.0.0.1:9", "security_protocol": "PLAINTEXT", "topics": ("a",), **overrides}
    return KafkaSettings.model_validate(values)


class SteppingClock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.pauses.append(seconds)
        self.now += seconds
