"""What a running generation has written: from the thread that owns the model to a reader in another one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from streamlearn.status.answered_by import Route


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """What is known of a generation before its first token."""

    step: int
    """Optimizer updates made before the job."""
    prompt_tokens: int
    """Tokens of the prompt."""
    route: Route
    """The prompt's regime, and what generates the text."""


class GenerationStream:
    """Text on its way. Thread-safe; no method blocks.

    A slow reader finds several pieces as one. What waits for it is never more than the text of the job, which
    `max_new_tokens` bounds.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        """`notify` is called in the writer's thread after every change, and must not block."""
        self._notify = notify
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self.start: GenerationStart | None = None
        """None before the job runs."""

    def begin(self, start: GenerationStart) -> None:
        """Say what generates the text."""
        self.start = start
        self._notify()

    def write(self, piece: str) -> None:
        """Add to the text."""
        if piece:
            with self._lock:
                self._pieces.append(piece)
            self._notify()

    def take(self) -> str:
        """Remove and return what was written since the last call."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return "".join(pieces)
