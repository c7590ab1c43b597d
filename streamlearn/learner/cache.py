"""The store of all adapters: those in memory, those offloaded to files, and copies for jobs that span several steps.

A pass uses the adapters of its own records only, so at most `max_in_memory` are in memory, with their optimizer state.
Beyond that the least recently used is offloaded to a file, and the first pass that uses it reads it back, bit for bit.
The number of regimes is thus bounded by the disk. The files are scratch: snapshots have their own, and the folder is
emptied at start and at the end.

An adapter has hundreds of small tensors. On a CPU they are parts of one allocation, which is freed as a whole. With 200
adapters this measured no less resident memory than separate ones; `daemon.process` bounds that.

An offloaded tensor is replaced by one of the same shape that takes no memory and whose elements are all NaN: using it
by mistake gives a loss that is not finite, and copying to it is an error.

A job that spans several training steps sees the weights of one step (`AdapterCache.pin`):

    at the first interruption   the job pins the weights: nothing is copied yet
    before an adapter changes   it is copied
    in each later slice         the copies are swapped in

So a job costs the memory of the adapters that are trained while it runs. An adapter that is removed, or replaced by
another one (a new regime in its slot, a rollback), is not copied: a slice that would use it ends the job with an error,
and the request can be repeated.
"""

import math
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from weakref import WeakSet

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamlearn.adapters.tuner import SHARED
from streamlearn.errors import AdapterGoneError, SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.learner.optimizer import Group, parameters_of

LINE = 16
"""Elements of float32 in a cache line."""

_log = get_logger("adapters")


class PinnedWeights:
    """The weights of one step. Created by `AdapterCache.pin`, which refers to it weakly: active while referenced."""

    def __init__(self, cache: "AdapterCache", tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """`tensors` are those that inference depends on, by adapter."""
        self._cache = cache
        self._tensors = dict(tensors)
        self._copies: dict[str, list[Tensor]] = {}
        self._removed: set[str] = set()
        self._in_use = False
        """Whether the job runs."""

    def before_change(self, adapters: Iterable[str]) -> None:
        """Copy these adapters, unless they were copied before or did not exist at the pin."""
        for name in adapters:
            if name in self._tensors and name not in self._copies:
                self._copies[name] = [tensor.detach().clone() for tensor in self._tensors[name]]

    def before_removal(self, name: str) -> None:
        """Drop an adapter, even if another takes its name."""
        if self._tensors.pop(name, None) is not None:
            self._copies.pop(name, None)
            self._removed.add(name)

    def check(self, adapters: Collection[str]) -> None:
        """Check that a pass inside `swapped_in` can use these adapters.

        Raises:
            AdapterGoneError: one was removed or replaced.
        """
        if self._in_use and not self._removed.isdisjoint(adapters):
            raise AdapterGoneError(
                "the weights of this request are gone: the regime that answers it was removed, replaced or rolled back "
                "while it ran; repeat the request"
            )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the copies inside the block; after it, or after an error, parameters point to their own memory again."""
        with self._cache.keeping(self._copies):
            live = {name: [tensor.data for tensor in self._tensors[name]] for name in self._copies}
            try:
                self._point_to(self._copies)
                self._in_use = True
                yield
            finally:
                self._in_use = False
                self._point_to(live)

    def _point_to(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        for name, values in tensors.items():
            for tensor, value in zip(self._tensors[name], values, strict=True):
                tensor.data = value


class AdapterCache:
    """The groups of each adapter by its name. Not thread-safe: the thread that owns the model uses it."""

    def __init__(self, folder: Path | None = None, max_in_memory: int = sys.maxsize) -> None:
        """`folder` is emptied; it is not needed, and not created, while all adapters are in memory."""
        assert folder is not None or max_in_memory == sys.maxsize, "offloaded adapters need a folder"
        self._folder, self._max_in_memory = folder, max_in_memory
        self._groups: dict[str, Sequence[Group]] = {}
        self._in_memory: dict[str, None] = {}
        """Names, the least recently used first."""
        self._current_files: set[str] = set()
        """Adapters whose file has their present values."""
        self._kept: frozenset[str] = frozenset()
        """Adapters that stay in memory."""
        self._pins: WeakSet[PinnedWeights] = WeakSet()
        self.num_reads = 0
        """Adapters read back so far."""
        self.clear_folder()

    @property
    def num_in_memory(self) -> int:
        """Adapters in memory."""
        return len(self._in_memory)

    def add(self, name: str, groups: Sequence[Group]) -> None:
        """Add an adapter, which is in memory; an older one of this name is removed."""
        self.remove(name)
        self._groups[name] = groups
        self._install(name, _copied(_tensors(groups)))
        self._in_memory[name] = None
        self._evict([name])

    def remove(self, name: str) -> None:
        """Remove an adapter and its file, if there is one of this name."""
        for pin in self._pins:
            pin.before_removal(name)
        self._groups.pop(name, None)
        self._in_memory.pop(name, None)
        self._current_files.discard(name)
        if self._folder is None:
            return
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:  # it is never read again, and removed at the next start
            _log.warning(Event.ADAPTER_NOT_REMOVED, adapter=name, folder=str(self._folder), error=str(error))

    def use(self, names: Collection[str]) -> None:
        """Bring these adapters into memory, all at a time; unknown names are ignored.

        Raises:
            SnapshotError: a file cannot be read back.
            AdapterGoneError: a job runs on pinned weights, and they have one of these adapters no longer.
        """
        for pin in self._pins:
            pin.check(names)
        used = [name for name in names if name in self._groups]
        for name in used:
            if name in self._in_memory:
                del self._in_memory[name]
            else:
                self._install(name, self._read(name))
                self.num_reads += 1
            self._in_memory[name] = None
        self._evict(used)

    def changed(self, names: Collection[str]) -> None:
        """Prepare for a change of these adapters, which are in memory: jobs copy them, and files become outdated."""
        for pin in self._pins:
            pin.before_change(names)
        self._current_files.difference_update(names)

    def pin(self, biases: Sequence[Tensor]) -> PinnedWeights:
        """Pin the present weights of all adapters, and the CP biases of the shared one."""
        tensors: dict[str, list[Tensor]] = {name: [*parameters_of(groups)] for name, groups in self._groups.items()}
        if biases:
            tensors[SHARED] += biases
        pin = PinnedWeights(self, tensors)
        if biases:
            pin.before_change([SHARED])  # a shift changes biases without a step
        self._pins.add(pin)
        return pin

    @contextmanager
    def keeping(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these adapters in memory for the duration of the block."""
        before, self._kept = self._kept, self._kept | frozenset(names)
        try:
            self.use(sorted(self._kept - before))
            yield
        finally:
            self._kept = before

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the weights and moments of an adapter by group and parameter, from memory or file; do not change them.

        Raises:
            SnapshotError: its file cannot be read back.
        """
        return _tensors(self._groups[name]) if name in self._in_memory else self._read(name)

    def clear_folder(self) -> None:
        """Remove all files. Offloaded adapters can no longer be used."""
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder)

    def _evict(self, in_use: Collection[str]) -> None:
        """Offload the least recently used adapters beyond the limit to files."""
        excess = len(self._in_memory) - self._max_in_memory
        if excess <= 0:
            return
        evictable = [name for name in self._in_memory if name not in in_use and name not in self._kept]
        for name in evictable[:excess]:
            try:
                self._write(name)
            except (OSError, SafetensorError) as error:  # learning continues; the next use tries again
                _log.warning(Event.ADAPTER_NOT_WRITTEN, adapter=name, folder=str(self._folder), error=str(error))
                return
            placeholders = {key: _placeholder(tensor) for key, tensor in _tensors(self._groups[name]).items()}
            self._install(name, placeholders)
            del self._in_memory[name]

    def _write(self, name: str) -> None:
        if name in self._current_files:
            return
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # safetensors refuses tensors of one allocation
        tensors = {key: tensor.cpu().clone() for key, tensor in _tensors(self._groups[name]).items()}
        save_file(tensors, self._path(name))
        self._current_files.add(name)

    def _read(self, name: str) -> dict[str, Tensor]:
        path = self._path(name)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                # Copied: a mapped tensor is read later, where an error of the disk would kill the process.
                return _copied({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as error:
            raise SnapshotError(
                f"{path} must hold an offloaded adapter, found: {error}; restart to continue from the newest snapshot, "
                "and check the disk"
            ) from error

    def _install(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Point parameters and moments to other tensors, on their device."""
        for group in self._groups[name]:
            for key, parameter in group.parameters.items():
                parameter.data = tensors[f"{group.name}.{key}"].to(parameter.device)
            for key, moment in group.moments.items():
                group.moments[key] = tensors[f"{group.name}.{key}"].to(moment.device)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.safetensors"


def _tensors(groups: Sequence[Group]) -> dict[str, Tensor]:
    named = ((group.name, {**group.parameters, **group.moments}) for group in groups)
    return {f"{name}.{key}": tensor.data for name, tensors in named for key, tensor in tensors.items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy float32 tensors into one allocation, each aligned to a cache line."""
    ends = list(accumulate(-(-tensor.numel() // LINE) * LINE for tensor in tensors.values()))
    device = next(iter(tensors.values())).device
    memory = torch.empty(ends[-1], dtype=torch.float32, device=device)
    copies = {}
    for (key, tensor), end in zip(tensors.items(), ends, strict=True):
        start = end - -(-tensor.numel() // LINE) * LINE
        copies[key] = memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
    return copies


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
