"""The time that the gateway adds to an answer."""

import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import Any

import orjson

DIRECT = 5
"""Every fifth request is made once more, of a server, under the same load."""
IN_FLIGHT = 64
TIMEOUT_S = 60.0


class AddedTime:
    """Asks for one token through bare connections, so that little but the gateway and a server takes time."""

    def __init__(self, gateway: str, server: str) -> None:
        self._hosts = {"gateway": gateway.removeprefix("http://"), "server": server.removeprefix("http://")}
        self._local = threading.local()
        self._taken_s: dict[str, list[float]] = {"gateway": [], "server": []}
        self._failed: list[str] = []

    def measure(self, prompts: Sequence[str], *, rate: float, seconds: float) -> dict[str, Any]:
        """Ask `rate` questions a second of the gateway, whenever the answers come.

        Returns:
            Milliseconds by way, their difference, and what failed.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for number in range(round(rate * seconds)):
                time.sleep(max(0.0, began + number / rate - time.monotonic()))
                pool.submit(self._ask_both, prompts[number % len(prompts)], number)
        took = time.monotonic() - began
        ways = {way: _milliseconds(taken) for way, taken in self._taken_s.items()}
        return {
            "asked_per_s": rate,
            "answered_per_s": round(len(self._taken_s["gateway"]) / took, 1),
            "failed": self._failed,
            "ms": ways,
            "added_p50_ms": round(ways["gateway"]["p50"] - ways["server"]["p50"], 1),
        }

    def _ask_both(self, prompt: str, number: int) -> None:
        try:
            model = self._ask("gateway", "streamlearn", prompt)
            if number % DIRECT == 0:
                self._ask("server", model, prompt)
        except (OSError, HTTPException, AssertionError) as error:
            self._local.__dict__.clear()
            self._failed.append(f"{type(error).__name__}: {error}")

    def _ask(self, way: str, model: str, prompt: str) -> str:
        """The name of the model that answered."""
        began = time.monotonic()
        connection = self._local.__dict__.setdefault(way, HTTPConnection(self._hosts[way], timeout=TIMEOUT_S))
        body = orjson.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, f"{way}: {answer.status} {content[:200]!r}"
        self._taken_s[way].append(time.monotonic() - began)
        return str(orjson.loads(content)["model"])


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    parts = statistics.quantiles(seconds, n=100)
    return {f"p{part}": round(1000 * parts[part - 1], 1) for part in (50, 95, 99)}
