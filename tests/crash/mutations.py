"""Mutations of the newest of two snapshots, and the fallback to the older one.

Every mutation is checked as at a start, by `SnapshotStore.newest`, which must move the mutated snapshot
aside and return the older one, bit for bit. Every hundredth mutation uses snapshots as large as the nano
backbone's, to measure the time of a fallback.
"""

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamlearn.errors import StreamlearnError
from streamlearn.snapshot.parts import adapter_part, state_part
from streamlearn.snapshot.store import SnapshotStore
from tests.crash.figures import percentile
from tests.snapshot.kit import adapter, draft, tensors

OLD, NEW = 1, 2
SMALL, LARGE = 64 << 10, 32 << 20
"""Bytes of tensors in a snapshot; the nano backbone's has 35 MB."""
LARGE_EVERY = 100
LONGEST_S = 2.0
"""Maximum time of a fallback."""

Contents = dict[str, bytes]
"""The content of files by relative name."""
Mutation = Callable[[Contents, str, random.Random], Contents]


def flipped(files: Contents, name: str, rng: random.Random) -> Contents:
    """Flip one bit."""
    data = bytearray(files[name])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return {**files, name: bytes(data)}


def cut(files: Contents, name: str, rng: random.Random) -> Contents:
    """Truncate a file."""
    return {**files, name: files[name][: rng.randrange(1, len(files[name]))]}


def longer(files: Contents, name: str, rng: random.Random) -> Contents:
    """Append bytes: zeros as a file system leaves them, random ones, or the file's beginning."""
    size = rng.choice((1, 1, 7, 512, 4096))
    return {**files, name: files[name] + rng.choice((bytes(size), rng.randbytes(size), files[name][:size]))}


def deleted(files: Contents, name: str, rng: random.Random) -> Contents:
    """Delete a file."""
    del rng
    return {other: data for other, data in files.items() if other != name}


def emptied(files: Contents, name: str, rng: random.Random) -> Contents:
    """Empty a file."""
    del rng
    return {**files, name: b""}


def exchanged(files: Contents, name: str, rng: random.Random) -> Contents:
    """Exchange two files."""
    other = rng.choice([other for other in files if other != name])
    return {**files, name: files[other], other: files[name]}


def zeroed(files: Contents, name: str, rng: random.Random) -> Contents:
    """Overwrite a part with zeros."""
    data = files[name]
    start = rng.randrange(len(data))
    part = data[start : start + rng.choice((1, 16, 512, 4096))]
    return {**files, name: data[:start] + bytes(len(part)) + data[start + len(part) :]}


def overwritten(files: Contents, name: str, rng: random.Random) -> Contents:
    """Overwrite a part with bytes from elsewhere in the snapshot."""
    data, source = files[name], files[rng.choice(list(files))]
    start, begin = rng.randrange(len(data)), rng.randrange(len(source))
    part = source[begin : begin + rng.choice((1, 16, 512))]
    return {**files, name: data[:start] + part + data[start + len(part) :]}


def extra(files: Contents, name: str, rng: random.Random) -> Contents:
    """Add a file that the manifest does not name."""
    return {**files, f"{name}{rng.choice(('.bak', '.tmp', '~'))}": rng.choice((b"", files[name]))}


MUTATIONS: tuple[Mutation, ...] = (
    flipped,
    cut,
    longer,
    deleted,
    emptied,
    exchanged,
    zeroed,
    overwritten,
    extra,
)


@dataclass
class Tally:
    """Counts, faults and times."""

    seed: int
    by_kind: Counter[str] = field(default_factory=Counter)
    by_file: Counter[str] = field(default_factory=Counter)
    undetected: list[str] = field(default_factory=list)
    """Mutations after which the newest snapshot was not moved aside."""
    older_damaged: list[str] = field(default_factory=list)
    """Mutations after which the older snapshot was not returned bit for bit."""
    small_s: list[float] = field(default_factory=list)
    large_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "seed": self.seed,
            "mutations": self.by_kind.total(),
            "by_kind": dict(sorted(self.by_kind.items())),
            "by_file": dict(sorted(self.by_file.items())),
            "undetected": self.undetected,
            "older_not_whole": self.older_damaged,
            "fallback_p50_ms": round(1000 * percentile(self.small_s, 50), 1),
            "fallback_p99_ms": round(1000 * percentile(self.small_s, 99), 1),
            "large_snapshot_mib": LARGE >> 20,
            "large_fallbacks": len(self.large_s),
            "large_fallback_p50_ms": round(1000 * percentile(self.large_s, 50), 1),
            "large_fallback_p99_ms": round(1000 * percentile(self.large_s, 99), 1),
            "slowest_fallback_s": round(max(self.small_s + self.large_s), 3),
            "seconds": round(self.seconds),
        }

    @property
    def clean(self) -> bool:
        """Whether every mutation was detected and every fallback was quick and complete."""
        slowest = max(self.small_s + self.large_s, default=0.0)
        return not (self.undetected or self.older_damaged) and slowest < LONGEST_S


class SnapshotPair:
    """Two snapshots, restored for each mutation."""

    def __init__(self, folder: Path, size: int) -> None:
        self._original, self._mutated = folder / "original", folder / "mutated"
        store = SnapshotStore(self._original / "snapshots", keep=2)
        for step in (OLD, NEW):
            store.save(draft(step), [adapter_part(adapter(step)), state_part(_state(step, size))])
        self.old, self.new = (contents(store.folder / name) for name in store.names())
        self._tensors = _state(OLD, size)

    def fall_back(self, mutated: Contents) -> tuple[float, str | None, str | None]:
        """Start on a mutated newest snapshot; return seconds, what was undetected, and faults of the older snapshot."""
        shutil.rmtree(self._mutated, ignore_errors=True)
        shutil.copytree(self._original / "snapshots" / f"{OLD:08d}", self._mutated / "snapshots" / f"{OLD:08d}")
        lay_out(mutated, self._mutated / "snapshots" / f"{NEW:08d}")
        store = SnapshotStore(self._mutated / "snapshots", keep=2)
        started = time.monotonic()
        try:
            snapshot = store.newest()
            found = snapshot.tensors() if snapshot is not None else {}
        except StreamlearnError as error:
            return time.monotonic() - started, None, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        if snapshot is None or snapshot.manifest.step != OLD:
            return seconds, f"found {snapshot and snapshot.name}", None
        aside = store.folder / f"damaged-{NEW:08d}"
        if contents(snapshot.path) != self.old or not aside.is_dir() or contents(aside) != mutated:
            return seconds, None, "the older snapshot or the one moved aside was changed"
        same = found.keys() == self._tensors.keys()
        same = same and all(torch.equal(found[key], self._tensors[key]) for key in found)
        return seconds, None, None if same else "the older snapshot's tensors differ"


def mutate(number: int, seed: int, folder: Path) -> Tally:
    """Make `number` mutations, each of which changes at least a byte or a name."""
    rng, tally, began = random.Random(seed), Tally(seed), time.monotonic()
    pairs = {}
    for size in (SMALL, LARGE) if number >= LARGE_EVERY else (SMALL,):
        (folder / str(size)).mkdir()
        pairs[size] = SnapshotPair(folder / str(size), size)
    for count in range(1, number + 1):
        size = SMALL if count % LARGE_EVERY else LARGE
        pair = pairs[size]
        mutation = MUTATIONS[count % len(MUTATIONS)]
        name = rng.choice(sorted(pair.new))
        while (mutated := mutation(pair.new, name, rng)) == pair.new:
            name = rng.choice(sorted(pair.new))
        seconds, undetected, wrong = pair.fall_back(mutated)
        what = f"{count}: {mutation.__name__} {name}"
        tally.by_kind[mutation.__name__] += 1
        tally.by_file[name] += 1
        tally.undetected += [f"{what}: {undetected}"] if undetected else []
        tally.older_damaged += [f"{what}: {wrong}"] if wrong else []
        (tally.small_s if size == SMALL else tally.large_s).append(seconds)
    tally.seconds = time.monotonic() - began
    return tally


def contents(folder: Path) -> Contents:
    """Read every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lay_out(files: Contents, folder: Path) -> None:
    """Write files below a folder; the inverse of `contents`."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _state(step: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {**tensors(step), "weights": torch.randn(size // 4, generator=generator)}
