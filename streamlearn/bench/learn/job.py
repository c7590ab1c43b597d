"""A run to make, and where its result goes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamlearn.bench.learn.splits import Draw
from streamlearn.bench.learn.suite import Suite
from streamlearn.bench.learn.suites import SUITES, of_folder


@dataclass(frozen=True)
class RunJob:
    """One run of one method on one suite with one seed."""

    suite: str
    """A suite's name, or a folder of task files."""
    method: str
    seed: int
    folders: tuple[str, ...]
    """Folders of task files that named suites draw from."""
    records: int
    tests: int
    out: str
    order: tuple[str, ...] = ()
    generate: bool = True

    @property
    def suite_name(self) -> str:
        """The suite's name in files and tables."""
        return self.suite if self.suite in SUITES else Path(self.suite).resolve().name

    @property
    def file(self) -> Path:
        """The result file."""
        method = self.method.replace(" ", "-").replace(",", "")
        return Path(self.out) / self.suite_name / f"{method}.{self.seed}.json"

    @property
    def running(self) -> Path:
        """The file that is locked while the run is in progress."""
        return self.file.with_suffix(".running")

    def to_json(self) -> str:
        """Return the command-line argument of the worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunJob":
        """Parse the result of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**fields)

    def make_suite(self) -> Suite:
        """Build the suite with this run's records."""
        draw = Draw([Path(folder) for folder in self.folders], self.records, self.tests, self.seed)
        if self.suite in SUITES:
            return SUITES[self.suite](draw)
        return of_folder(Path(self.suite), draw, self.order)
