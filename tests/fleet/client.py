"""Clients of the gateway: requests at a steady rate through the official client, whatever else happens."""

import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

MAX_TOKENS = 16
TIMEOUT_S = 300.0
IN_FLIGHT = 64


@dataclass(frozen=True)
class Question:
    """A prompt with its expected answer."""

    task: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Outcome:
    """One request and what came back."""

    question: Question
    asked_at: float
    """Unix time."""
    answered_at: float
    error: str | None
    model: str = ""
    """That the answer names."""
    publication: int = -1
    """That the gateway used."""
    text: str = ""


class Clients:
    """Asks `rate` questions a second until it is stopped; every one is counted."""

    def __init__(self, url: str, questions: Mapping[str, Sequence[Question]], *, rate: float, seed: int) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
        self._questions, self._rate = questions, rate
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        self._thread = threading.Thread(target=self._ask_steadily, daemon=True)
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more, and wait for the answers under way."""
        self._stopping.set()
        self._thread.join()
        self._pool.shutdown()

    def _ask_steadily(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            task = self._random.choice(list(self._questions))
            self._pool.submit(self._ask, self._random.choice(self._questions[task]))
            due += 1 / self._rate
            time.sleep(max(0.0, due - time.monotonic()))

    def _ask(self, question: Question) -> None:
        asked_at = time.time()
        try:
            raw = self._client.completions.with_raw_response.create(
                model="streamlearn", prompt=question.prompt, max_tokens=MAX_TOKENS, temperature=0.0
            )
            answer, publication = raw.parse(), int(raw.headers["x-streamlearn-publication"])
            text = answer.choices[0].text
            self.outcomes.append(Outcome(question, asked_at, time.time(), None, answer.model, publication, text))
        except Exception as error:  # noqa: BLE001 - every failure is counted, whatever it is
            self.outcomes.append(Outcome(question, asked_at, time.time(), f"{type(error).__name__}: {error}"))
