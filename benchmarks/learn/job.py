"""A run to make, under which conditions, and where its result goes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learn.profile import read_profile
from benchmarks.learn.splits import Draw, Split
from benchmarks.learn.suite import Suite
from benchmarks.learn.suites import SUITES, of_folder


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
    """Maximum training records per task."""
    evaluated: int
    """Maximum scored records per task."""
    out: str
    order: tuple[str, ...] = ()
    backbone: str | None = None
    """Folder of the backbone; None for the profile's."""
    profile: str = "nano"
    """A packaged profile's name, or a profile's file."""
    split: Split = "test"
    """The records that are scored."""
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Changes of this run only, by dotted key: the values that a trial of a search tries."""
    label: str = ""
    """Folder of a trial under `out`; empty for a run that is no trial."""
    only_at_end: bool = False
    """Whether the run is scored at the end of the stream only."""

    @property
    def suite_name(self) -> str:
        """The suite's name in files and tables."""
        return self.suite if self.suite in SUITES else Path(self.suite).resolve().name

    @property
    def title(self) -> str:
        """Suite, method, seed and label, for people."""
        return "  ".join(filter(None, (self.suite_name, self.method, f"seed {self.seed}", self.label)))

    @property
    def file(self) -> Path:
        """The result file."""
        method = self.method.replace(" ", "-").replace(",", "")
        return Path(self.out) / self.label / self.suite_name / f"{method}.{self.seed}.json"

    @property
    def running(self) -> Path:
        """The file that is locked while the run is in progress."""
        return self.file.with_suffix(".running")

    @property
    def error(self) -> Path:
        """The file with the end of a failed run's output."""
        return self.file.with_suffix(".error")

    def to_json(self) -> str:
        """Return the command-line argument of the worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunJob":
        """Parse the result of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "folders": tuple(values["folders"]), "order": tuple(values["order"])})

    def make_suite(self) -> Suite:
        """Build the suite with this run's records."""
        folders = [Path(folder) for folder in self.folders]
        prompts = read_profile(self.profile).prompts
        draw = Draw(folders, self.records, self.evaluated, self.seed, self.split, prompts)
        named = self.suite in SUITES
        suite = SUITES[self.suite](draw) if named else of_folder(Path(self.suite), draw, self.order)
        return suite.scored_at_end() if self.only_at_end else suite


@dataclass(frozen=True)
class RunConditions:
    """What the runs of one command have in common."""

    data: tuple[Path, ...]
    """Folders of task files."""
    out: Path
    profile: str = "nano"
    """A packaged profile's name, or a profile's file."""
    backbone: Path | None = None
    """Folder of the backbone; None for the profile's."""
    split: Split = "test"
    records: int | None = None
    """Maximum training records per task; None for the profile's."""
    evaluated: int = 50
    """Maximum scored records per task."""
    order: tuple[str, ...] = ()
    """Tasks of a folder, in training order; empty for the order of their names."""

    def check(self) -> None:
        """Check that the profile can be read and has a backbone.

        Raises:
            UsageError: it cannot, or has none; the message names the option.
        """
        read_profile(self.profile).model(self.backbone)

    def job(
        self,
        suite: str,
        method: str,
        seed: int,
        *,
        own: Mapping[str, Any] | None = None,
        label: str = "",
        only_at_end: bool = False,
    ) -> RunJob:
        """Return a run under these conditions; its paths are absolute.

        Raises:
            UsageError: the profile cannot be read.
        """
        packaged = not Path(self.profile).is_file()
        return RunJob(
            suite=suite if suite in SUITES else str(Path(suite).resolve()),
            method=method,
            seed=seed,
            folders=tuple(str(folder.resolve()) for folder in self.data),
            records=self.records or read_profile(self.profile).records,
            evaluated=self.evaluated,
            out=str(self.out.resolve()),
            order=self.order,
            backbone=str(self.backbone.resolve()) if self.backbone else None,
            profile=self.profile if packaged else str(Path(self.profile).resolve()),
            split=self.split,
            own=own or {},
            label=label,
            only_at_end=only_at_end,
        )
