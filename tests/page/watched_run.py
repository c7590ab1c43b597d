"""A daemon with a tiny backbone and a stream that is written while it runs, so that a shift comes when it is wanted."""

from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import orjson

from tests.docs.place import free_port
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess
from tests.regimes.shifting_streams import stream

TASKS = ("animals", "sums", "cities", "animals")
"""Three shifts: two new regimes, and one that returns."""
PER_TASK = 120
ENDLESS = 200_000
UNUSABLE = (b"not json\n", b'{"prompt": "no completion"}\n', b"[1, 2]\n")


class WatchedRun:
    """The daemon and its stream."""

    def __init__(
        self, folder: Path, *, backbone: str | None = None, process: type[DaemonProcess] = DaemonProcess, **changes: Any
    ) -> None:
        """`backbone` takes the tiny one's place, and other sections those of the same name."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self._stream = folder / "stream.jsonl"
        self._stream.touch()
        (folder / "general.jsonl").write_bytes(b'{"text": "hello world"}\n')
        self.daemon = process(
            folder / "daemon",
            {
                "source": {"jsonl": {"path": str(self._stream), "follow": True, "poll_interval_s": 0.05}},
                "stream": {"max_tokens": 128, "batch_tokens": 1024, "batch_records": 8, "linger_s": 0.2},
                "backbone": {"model": backbone or str(tiny_backbone(folder / "backbone")), "dtype": "float32"},
                "adapter": {"num_heads": 4},
                "learner": {"lr": 1e-2},
                "holdout": {
                    "every_records": 10,
                    "time_share": 0.5,
                    "canaries": [str((folder / "general.jsonl").resolve())],
                },
                "probe": {"similarity_tokens": 256},
                "snapshot": {"every_records": 100},
                "serve": {"port": self.port},
                "log": {"style": "json", "level": "info"},
                **changes,
            },
        )

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_until(self._is_ready, "the daemon is ready")

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}readyz").status_code == 200
        except httpx2.TransportError:
            return False

    @property
    def token(self) -> str:
        return (self.daemon.state / "http.token").read_text().strip()

    def get(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx2.get(f"{self.url}{path}", headers=headers, timeout=30).raise_for_status().json()

    def post(self, path: str, body: Any = None) -> None:
        headers = {"authorization": f"Bearer {self.token}"}
        httpx2.post(f"{self.url}{path}", json=body, headers=headers, timeout=30).raise_for_status()

    def feed(self, task: int, *, unusable: bool = False) -> None:
        """Append the records of one task of `TASKS`, after some that cannot be used if asked for."""
        rows = stream(*TASKS[: task + 1], per_task=PER_TASK)[-PER_TASK:]
        with self._stream.open("ab") as file:
            file.write(b"".join(UNUSABLE) if unusable else b"")
            file.writelines(row + b"\n" for row in rows)

    def feed_endlessly(self) -> None:
        """Write more records of one kind than anybody waits for: each step is as long as the next."""
        rows = stream(TASKS[0], per_task=ENDLESS)
        self._stream.write_bytes(b"".join(row + b"\n" for row in rows))

    def ask(self) -> None:
        """Two requests: one like the stream, and one that is like nothing in it."""
        for prompt in ("the fox and the dog met number 1234 in the", "zzz @@ ## 42 qqq"):
            body = {"model": "streamlearn", "prompt": prompt, "max_tokens": 2}
            httpx2.post(f"{self.url}v1/completions", json=body, timeout=120).raise_for_status()

    def wait_until_read(self) -> None:
        num_lines = self._stream.read_bytes().count(b"\n")
        self.daemon.wait_until(lambda: self._position() == num_lines, f"{num_lines} lines are trained on")

    def _position(self) -> int:
        partitions = self.get("v1/status")["partitions"]
        return int(partitions[0]["position"]) if partitions else 0

    def shifts(self) -> list[datetime]:
        """When each shift was logged, by the daemon's clock; the first regime is not one of them."""
        events = [orjson.loads(line) for line in self.daemon.log.read_bytes().splitlines() if line.startswith(b"{")]
        found = [event for event in events if event["event"] == "shift_detected"]
        return [datetime.fromisoformat(event["timestamp"]) for event in found]
