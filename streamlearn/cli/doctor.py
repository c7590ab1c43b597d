"""The doctor command: every precondition of a start, checked in order, with what to do about each fault.

Nothing is changed: no offset is committed, no snapshot written, no record trained on, no model fetched. Each check
calls the code that a start calls. A check is skipped if one that it depends on failed.

Not checked, because it takes as long as a start: that every weight is in the safetensors files, that the tokenizer and
the image processor load, and that published versions are undamaged. Model servers, the hub and MLflow are not asked,
because a start does not need them.
"""

import importlib.util
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import torch
from rich.table import Table
from rich.text import Text

from connectors.open import open_dead_letters, open_source
from streamlearn import track as tracking
from streamlearn.adapters.check import LinearShapes, activated_parameters, adapter_bytes, check, decoder_targets
from streamlearn.adapters.check import check as check_adapter
from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.backbone.attention import BLOCK
from streamlearn.backbone.load import Arithmetic, Outline, choose, device_of, locate, outline
from streamlearn.backbone.load import identity as backbone_identity
from streamlearn.backbone.quantization import KINDS
from streamlearn.daemon.checkpoint import source_identity
from streamlearn.daemon.model import adapter_of, adapter_shape
from streamlearn.errors import (
    ConfigError,
    DeadLetterError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotMismatchError,
    SourceError,
    StateLockedError,
    StreamlearnError,
)
from streamlearn.http.guards import obtain, token_path
from streamlearn.learner.loss import CPU_LOGITS, GPU_LOGITS
from streamlearn.publish import publisher as publishing
from streamlearn.settings import Quantization, Settings, fingerprint, with_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.parts import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.record import Position

RECORD_TOKENS = 256
"""Length of records, and of batches, that is the last thing advised: longer records lose their start."""

Change = Mapping[str, Any]
"""SECTION.KEY -> value, of what is changed together."""


def advice(settings: Settings, needed: Callable[[Settings], int], available: int) -> str | None:
    """Return the settings that make a step fit, of those that change least of the result.

    1. Changes are added, the most harmless first, until the step fits.
    2. Those that it fits without are taken back.

    Args:
        settings: What does not fit.
        needed: Estimates the memory of a step of settings, bytes.
        available: Memory that there is, bytes.

    Returns:
        For example `set learner.activation_checkpointing: true and backbone.quantization: int8`; None: nothing helps.
    """
    # 1.
    chosen: list[Change] = []
    for change in _changes(settings):
        chosen.append(change)
        if needed(_changed(settings, chosen)) <= available:
            break
    else:
        return None
    # 2.
    for change in list(chosen):
        others = [each for each in chosen if each is not change]
        if needed(_changed(settings, others)) <= available:
            chosen = others
    values = {key: value for change in chosen for key, value in change.items()}
    return "set " + " and ".join(f"{key}: {_yaml(value)}" for key, value in values.items())


def _changes(settings: Settings) -> Iterator[Change]:
    """What takes less memory, from what changes nothing of the result to what changes most."""
    if not settings.learner.activation_checkpointing:
        yield {"learner.activation_checkpointing": True}
    for number in (8, 1):
        if settings.adapter.max_in_memory > number:
            yield {"adapter.max_in_memory": number}
    kinds = get_args(Quantization)  # from the largest
    for kind in kinds[kinds.index(settings.backbone.quantization) + 1 :]:
        yield {"backbone.quantization": kind}
    if settings.stream.batch_tokens > settings.stream.max_tokens:
        yield {"stream.batch_tokens": settings.stream.max_tokens}
    if settings.stream.max_tokens > RECORD_TOKENS:
        yield {"stream.max_tokens": RECORD_TOKENS, "stream.batch_tokens": RECORD_TOKENS}


def _changed(settings: Settings, changes: Sequence[Change]) -> Settings:
    """The settings with changes; of two to one key the later one holds."""
    for change in changes:
        for name, value in change.items():
            section, _, key = name.partition(".")
            changed = getattr(settings, section).model_copy(update={key: value})
            settings = settings.model_copy(update={section: changed})
    return settings


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_CGROUP, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that a process may use on a device: all of it, or less by the limit of a cgroup."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *cgroup_limits()])


def cgroup_limits(processes: Path = _CGROUP, root: Path = _ROOT) -> Iterator[int]:
    """Yield the memory limits of this process's cgroup (version 2) and of those above it, bytes.

    Args:
        processes: The file that names the process's cgroup.
        root: Where cgroups are mounted.
    """
    try:
        lines = processes.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # no Linux
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number == "0":  # version 2; in a container the path is that inside it
            own = Path(path.lstrip("/"))
            for folder in (own, *own.parents):
                yield from _limit(root / folder / "memory.max")


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    if text != "max":
        yield int(text)


# How much memory the largest step of a configuration takes, from its architecture and settings.
#
#     M = process + weights + experts + c (activations + max(loss, backward))                         (1)
#
# The largest step has one batch of `stream.batch_tokens` tokens T, in records of `stream.max_tokens` each, all of them
# learned. What a decoder layer keeps of it for the backward pass, in bytes a token, e those of the dtype:
#
#     norms        4 per feature that a norm reads: it computes in float32                            (2)
#     attention    e (2 Q + 2 G): queries, keys, values and output, of Q and G features               (3)
#     attention    e (Q + 2 G) + 6 heads * (tokens attended to), for bfloat16 on a CPU                (4)
#     MLP          3 e F: gate, its activation, up, of F features                                     (5)
#     adapters     e per feature that adapted linears read, and H K (e R + 9) for each of them;       (6)
#                  the 9 are logits, gates and selection, where there is a router
#
# c is the part that glibc does not return to the system, see `runtime.heap`; it was fitted to measured steps. On a GPU,
# and where freed memory is returned at once, c = 1. With `learner.activation_checkpointing` a layer keeps e D, its
# input,
# and one layer at a time has the rest. The terms were read off autograd's saved tensors; `streamlearn bench memory`
# compares their sum with measured steps. They are those of Qwen3, Llama, Mistral and Gemma on text: images add to it,
# and other architectures differ.


# T tokens, F features of the MLP, D hidden size, H heads of an adapter, K experts a head, R rank.


FLOAT32 = 4
"""Bytes of a number of an expert, its gradient and its moments."""
KEPT_BY_GLIBC = 1.35
"""c of eq. (1) on a CPU without checkpointing: 1.16 to 1.63 in six configurations."""
READ = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""What the estimate reads of a model's configuration."""


@dataclass(frozen=True)
class StepMemory:
    """The terms of eq. (1), bytes."""

    process: int
    """What the process has before it loads the model."""
    weights: int
    """The frozen backbone."""
    experts: int
    """Adapters in memory, with the optimizer's moments, and the gradient of one."""
    activations: int
    """What the forward pass keeps for the backward pass."""
    loss: int
    """A chunk of logits, and the gradient of the hidden states."""
    backward: int
    """Gradients of one layer's activations, and with checkpointing those activations."""
    kept_by_allocator: float
    """c."""

    @property
    def total(self) -> int:
        """The largest that the process gets."""
        step = self.activations + max(self.loss, self.backward)
        return self.process + self.weights + self.experts + int(self.kept_by_allocator * step)

    def __str__(self) -> str:
        sizes = {name: size for name, size in asdict(self).items() if name != "kept_by_allocator"}
        return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())


def can_estimate(shape: Outline) -> bool:
    """Whether the model's configuration says all that `step_memory` reads."""
    return all(hasattr(shape.config.get_text_config(), name) for name in READ)


def step_memory(
    settings: Settings,
    shape: Outline,
    adapter: HeadLoraConfig,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
    adapters: int,
    process: int,
) -> StepMemory:
    """Estimate the memory of the largest step.

    Args:
        settings: The sections `backbone`, `stream` and `learner`.
        shape: The backbone, which `can_estimate`.
        adapter: The adapter.
        dtype: That of the activations.
        on_cpu: Whether the step is computed on a CPU; if not, on a GPU.
        adapters: Number of adapters in memory.
        process: What the process has on the device before, bytes.
    """
    size, tokens = dtype.itemsize, settings.stream.batch_tokens
    text = shape.config.get_text_config()
    one = adapter_bytes(adapter, shape.linears)
    layer = _Layer(shape, adapter, size=size, by_products=on_cpu and dtype == torch.bfloat16)
    whole = tokens * layer.bytes_per_token(settings.stream.max_tokens)
    layers = text.num_hidden_layers - adapter.first_layer
    transient = tokens * size * (3 * text.intermediate_size + 2 * text.hidden_size)
    if settings.learner.activation_checkpointing:
        activations, transient = layers * tokens * text.hidden_size * size, transient + whole
    else:
        activations = layers * whole
    casts = one // 3 * size // FLOAT32 if size < FLOAT32 else 0
    logits = min(CPU_LOGITS if on_cpu else GPU_LOGITS, tokens * text.vocab_size)
    return StepMemory(
        process=process,
        weights=_weight_bytes(settings, shape, size),
        experts=adapters * one + one // 3,
        activations=activations + casts,
        loss=logits * (2 * 4 + (size if size < FLOAT32 else 0)) + tokens * text.hidden_size * size,
        backward=transient,
        kept_by_allocator=KEPT_BY_GLIBC if on_cpu and not settings.learner.activation_checkpointing else 1.0,
    )


def _weight_bytes(settings: Settings, shape: Outline, size: int) -> int:
    if settings.backbone.quantization == "none":
        return shape.num_parameters * size
    quantized = sum(i * o for i, o in shape.linears.values())
    stored = quantized * KINDS[settings.backbone.quantization].bytes_per_weight
    return (shape.num_parameters - quantized) * size + int(stored)


class _Layer:
    """What one decoder layer keeps."""

    def __init__(self, shape: Outline, adapter: HeadLoraConfig, *, size: int, by_products: bool) -> None:
        text = shape.config.get_text_config()
        self._size, self._by_products, self._adapter = size, by_products, adapter
        self._heads: int = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // self._heads
        self._queries: int = self._heads * width
        self._keys: int = text.num_key_value_heads * width
        self._hidden: int = text.hidden_size
        self._mlp: int = text.intermediate_size
        of_heads = {"q_norm": self._queries, "k_norm": self._keys}
        self._norms: int = sum(of_heads.get(name, self._hidden) for name in shape.norms)
        chosen = decoder_targets(adapter, shape.linears)
        self._adapted: LinearShapes = {name.rpartition(".")[2]: each for name, each in chosen.items()}

    def bytes_per_token(self, record_tokens: int) -> int:
        """Eq. (2) to (6), in a batch of records of this length."""
        return 4 * self._norms + self._attention(record_tokens) + 3 * self._size * self._mlp + self._experts()

    def _attention(self, record_tokens: int) -> int:
        """Eq. (3) or (4)."""
        if not self._by_products:
            return self._size * 2 * (self._queries + self._keys)
        attended = (record_tokens + BLOCK) // 2  # mean over the tokens of a record, whose blocks end at multiples
        return self._size * (self._queries + 2 * self._keys) + 6 * self._heads * attended

    def _experts(self) -> int:
        """Eq. (6)."""
        config = self._adapter
        inputs = {"qkv": self._hidden, "o": self._queries, "gate_up": self._hidden, "down": self._mlp}
        read = {_input_of(name) for name in self._adapted}
        each = config.num_heads * config.num_experts * (self._size * config.r + (9 if config.routed else 0))
        return self._size * sum(inputs[name] for name in read) + len(self._adapted) * each


def _input_of(linear: str) -> str:
    """What a linear reads; several read the same."""
    return {"o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}.get(linear, "qkv")


CODECS = {"lz4": "lz4", "snappy": "snappy", "zstd": "zstandard"}
"""Kafka's name of a codec -> the module that decompresses it; gzip is in the standard library."""
STATE_FILES = ("journal.jsonl", "in-hand", "deaths.json")
"""Files of the state folder that a start opens for writing; the lock is checked by taking it."""
SPARE = 2
"""Snapshots beyond snapshot.keep that may be on disk: the one being written, and the one that it replaces."""
COPIES = 3
"""Of each regime's adapter on disk while it rests: two in snapshots, of which the others are links, and its file."""
POLL_S, PATIENCE_S = 3.0, 10.0
EARLIEST_CLOCK = 1_767_225_600  # 2026: a clock that was never set reads 1970
CUDA_CONTEXT_BYTES = 1 << 29
"""Size assumed for what CUDA and its libraries take on a GPU."""
UNKNOWN_BYTES = 1 << 30
"""Size assumed for a snapshot before there is one."""


class Level(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    text: str
    """What was found and, if something is wrong, what to do."""
    exit_code: int = 0
    """What `run` would exit with; 0 unless the check failed."""


@dataclass
class Doctor:
    """The checks of one configuration, in the order of a start."""

    settings: Settings
    _shape: Outline | None = None
    _chosen: Arithmetic | None = None
    _snapshot: Snapshot | None = None
    _locked: bool = False
    _failed: set[str] = field(default_factory=set)

    def examine(self) -> Iterator[Finding]:
        """Run the checks; yields each finding as soon as it is known."""
        checks: tuple[tuple[str, Callable[[], tuple[Level, str]], tuple[str, ...]], ...] = (
            ("clock", self._clock, ()),
            ("backbone", self._backbone, ()),
            ("publishing", self._publishing, ()),
            ("trackers", self._trackers, ()),
            ("arithmetic", self._arithmetic, ()),
            ("state folder", self._state, ()),
            ("snapshots", self._snapshots, ("state folder", "backbone")),
            ("disk", self._disk, ("state folder",)),
            ("regimes", self._regimes, ("backbone", "state folder")),
            ("memory", self._memory, ("backbone", "arithmetic")),
            ("codecs", self._codecs, ()),
            ("source", self._source, ("snapshots",)),
            ("dead letters", self._dead_letters, ("state folder",)),
            ("http", self._http, ("state folder",)),
        )
        for name, run_check, needs in checks:
            missing = sorted(self._failed & set(needs))
            if missing:
                yield Finding(name, Level.SKIPPED, f"needs {', '.join(missing)}")
                continue
            try:
                level, text = run_check()
            except StreamlearnError as error:
                self._failed.add(name)
                yield Finding(name, Level.FAILED, str(error), error.exit_code)
            else:
                yield Finding(name, level, text)

    def _clock(self) -> tuple[Level, str]:
        now = time.time()  # noqa: TID251 - warns that the clock is not set
        text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        if now < EARLIEST_CLOCK:
            return Level.WARNING, (
                f"{text}: the clock is not set, so TLS certificates will look invalid. Training does not depend on it"
            )
        return Level.OK, text

    def _backbone(self) -> tuple[Level, str]:
        config, model = adapter_of(self.settings), self.settings.backbone.model
        if locate(self.settings.backbone) is None:
            self._failed.add("backbone")
            return Level.WARNING, f"{model} is not on this machine: the first start fetches it from the hub"
        shape = self._shape = outline(self.settings.backbone)
        self.settings = with_defaults(self.settings, is_vision=shape.is_vision, per_regime=config.per_regime)
        check_adapter(config, shape.linears, shape.tower_linears)
        return Level.OK, f"{model} in {shape.folder}, adapter {self.settings.adapter.preset} fits"

    def _publishing(self) -> tuple[Level, str]:
        own = self.settings.publish
        if own is None:
            return Level.OK, "off: there is no section publish"
        publishing.check(self.settings, adapter_of(self.settings), self._shape)
        publishing.check_disk(self.settings)
        targets = [f"{own.folder}{'' if own.folder.exists() else ', which will be created'}"]
        if own.vllm is not None:
            targets.append(f"vLLM servers: {len(own.vllm.replicas)}, not asked")
        if own.hub is not None:
            targets.append(f"hub repository {own.hub.repository}")
        return Level.OK, "; ".join(targets)

    def _trackers(self) -> tuple[Level, str]:
        track = self.settings.track
        if track is None:
            return Level.OK, "off: there is no section track"
        tracking.check(self.settings)
        targets = [f"{track.tensorboard}"] if track.tensorboard is not None else []
        targets += [f"{track.mlflow.uri}, not asked"] if track.mlflow is not None else []
        obstacle = None if track.tensorboard is None else _obstacle_to_create(track.tensorboard / "events")
        if obstacle:
            return Level.WARNING, f"{track.tensorboard} cannot be written, {obstacle}; training does not depend on it"
        return Level.OK, "; ".join(targets)

    def _arithmetic(self) -> tuple[Level, str]:
        device = device_of(self.settings.backbone)
        chosen = self._chosen = choose(self.settings.backbone.dtype, device)
        return Level.OK, f"{chosen.name} on {device}: {chosen.reason}"

    def _state(self) -> tuple[Level, str]:
        folder = self.settings.state
        if not folder.exists():
            if obstacle := _obstacle_to_create(folder):
                raise SnapshotError(f"{folder}: cannot be created, {obstacle}; set state to another folder")
            return Level.OK, f"{folder} will be created"
        try:
            StateLock(folder).release()
        except StateLockedError as error:
            self._locked = True
            return Level.WARNING, f"a daemon is running: {error}"
        started = time.monotonic()
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
                file.write(b"0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{folder}: expected a writable folder, found: {error.strerror}; set state") from error
        seconds = time.monotonic() - started
        for path in (folder / name for name in STATE_FILES):
            if obstacle := _obstacle_to_append(path):
                raise SnapshotError(f"{path}: expected a file that this user may read and write, found: {obstacle}")
        return Level.OK, f"{folder}, a durable write took {1e3 * seconds:.1f} ms"

    def _snapshots(self) -> tuple[Level, str]:
        store = SnapshotStore(self.settings.state / "snapshots", keep=self.settings.snapshot.keep)
        names, damaged = store.names(), list[str]()
        for name in reversed(names):
            try:
                store.verify(name)
            except SnapshotDamagedError as error:
                damaged.append(str(error))
                continue
            self._snapshot = store.load(name)
            break
        if self._snapshot is None:
            moved_aside = sorted(map(str, store.folder.glob("damaged-*")))
            if not damaged and not moved_aside:
                return Level.OK, "none yet: a start begins a new run"
            raise SnapshotError(
                f"expected a valid snapshot in {store.folder}, found only damaged ones: "
                f"{'; '.join(damaged or moved_aside)}; restore one from a copy, or start anew with --fresh, which "
                "keeps them"
            )
        assert self._shape is not None
        backbone = backbone_identity(self.settings.backbone, self._shape)
        adapter = adapter_shape(adapter_of(self.settings))
        manifest = self._snapshot.manifest
        compatibility.check(manifest, fingerprint(self.settings), backbone, adapter, accept=False)
        text = f"{len(names)}, a start resumes after step {manifest.step} at {manifest.position}"
        return (Level.WARNING, f"{text}; damaged: {'; '.join(damaged)}") if damaged else (Level.OK, text)

    def _disk(self) -> tuple[Level, str]:
        folder = self.settings.state
        free = _free_disk(folder)
        store = SnapshotStore(folder / "snapshots", keep=self.settings.snapshot.keep)
        try:
            largest = max((info.bytes for info in store.infos()), default=UNKNOWN_BYTES)
        except SnapshotMismatchError:  # of another format; the check of snapshots reports it
            largest = UNKNOWN_BYTES
        wanted = largest * (self.settings.snapshot.keep + SPARE)
        text = f"{free / 2**30:.1f} GiB free, snapshots may need {wanted / 2**30:.1f} GiB"
        if free < largest * SPARE:
            raise ConfigError(f"{folder}: {text}; free some space, or set state to a folder on another disk")
        return (Level.OK if free >= wanted else Level.WARNING), text

    def _regimes(self) -> tuple[Level, str]:
        config, limit = adapter_of(self.settings), self.settings.shift.max_regimes
        if not config.per_regime:
            return Level.OK, f"at most {limit}, which share one adapter"
        assert self._shape is not None, "the check of the backbone came before"
        one = adapter_bytes(config, self._shape.linears)
        in_memory = min(limit, self.settings.adapter.max_in_memory)
        disk, memory = one * limit * COPIES, one * in_memory
        text = f"at most {limit} adapters of {one / 2**20:.1f} MiB: {_gib(disk)} of disk, "
        text += f"{_gib(memory)} of memory for {in_memory} of them"
        free, total = _free_disk(self.settings.state), total_memory(device_of(self.settings.backbone))
        if disk > free:
            return Level.WARNING, f"{text}; {_gib(free)} of disk are free: lower shift.max_regimes"
        if memory > total:
            return Level.WARNING, f"{text}; the device has {_gib(total)} of memory: lower adapter.max_in_memory"
        return Level.OK, text

    def _memory(self) -> tuple[Level, str]:
        assert self._shape is not None, "the check of the backbone came before"
        if not can_estimate(self._shape):
            return Level.OK, f"not estimated for {self._shape.config.model_type}"
        device = device_of(self.settings.backbone)
        available, found = total_memory(device), self._step_memory(self.settings, device)
        text = f"the largest step takes some {_gib(found.total)} of {_gib(available)} ({found}"
        text += ", without images)" if self._shape.is_vision else ")"
        if found.total <= available:
            return Level.OK, text
        fits = advice(self.settings, lambda settings: self._step_memory(settings, device).total, available)
        return Level.WARNING, f"{text}; {fits or 'no setting makes it fit: choose a smaller backbone'}"

    def _step_memory(self, settings: Settings, device: torch.device) -> StepMemory:
        assert self._shape is not None
        assert self._chosen is not None, "the check of the arithmetic came before"
        adapter = adapter_of(settings)
        return step_memory(
            settings,
            self._shape,
            adapter,
            dtype=self._chosen.dtype,
            on_cpu=device.type == "cpu",
            adapters=min(settings.shift.max_regimes, settings.adapter.max_in_memory) if adapter.per_regime else 1,
            process=_resident_memory() if device.type == "cpu" else CUDA_CONTEXT_BYTES,
        )

    def _codecs(self) -> tuple[Level, str]:
        if self.settings.source.kafka is None:
            return Level.OK, "not needed: the source is a file"
        missing = [name for name, module in CODECS.items() if importlib.util.find_spec(module) is None]
        if missing:
            return Level.WARNING, (
                f"records compressed with {', '.join(missing)} cannot be read: pip install 'streamlearn[codecs]'"
            )
        return Level.OK, f"gzip, {', '.join(CODECS)}"

    def _source(self) -> tuple[Level, str]:
        position = self._snapshot.manifest.position if self._snapshot else Position({})
        remembered = source_identity(self._snapshot) if self._snapshot else {}
        with closing(open_source(self.settings.source, start_timeout_s=PATIENCE_S)) as source:
            found = source.seek(position, remembered)
            deadline = time.monotonic() + POLL_S
            num_read = 0
            while not num_read and not source.exhausted and time.monotonic() < deadline:
                num_read = len(source.poll(max_records=1, timeout_s=POLL_S / 4))
            lag = sum(source.lag(found).values())
        text = f"next {found}, {lag} offsets behind the end"
        if lag and not num_read:
            raise SourceError(
                f"{text}, but no record arrived in {POLL_S:g} s: check that this user may read the topics (ACL READ)"
            )
        lost = "; ".join(f"{origin} [{start}, {stop})" for origin, start, stop in position.gaps_to(found))
        if lost:
            return Level.WARNING, f"{text}; a start skips {lost}, as source.kafka.offset.gap.policy allows"
        return Level.OK, text

    def _dead_letters(self) -> tuple[Level, str]:
        if self.settings.dead_letters.topic is not None:
            with closing(open_dead_letters(self.settings, start_timeout_s=PATIENCE_S)) as sink:
                sink.mark()
            return Level.OK, f"topic {self.settings.dead_letters.topic}"
        file = self.settings.dead_letter_file
        assert file is not None, "no topic is set"
        obstacle = _obstacle_to_append(file) if file.exists() else _obstacle_to_create(file)
        if obstacle:
            raise DeadLetterError(f"{file}: cannot be written, {obstacle}; set dead_letters.file or dead_letters.topic")
        return Level.OK, f"{file}"

    def _http(self) -> tuple[Level, str]:
        serve = self.settings.serve
        ports = []
        if serve.enabled:
            if serve.token_file is not None or token_path(self.settings).exists():
                obtain(self.settings)
            if serve.tls_certfile is not None:
                _check_certificate(serve.tls_certfile, serve.tls_keyfile)
            ports.append(("serve.port", serve.host, serve.port))
        if serve.health_port is not None:
            ports.append(("serve.health_port", serve.health_host, serve.health_port))
        if not ports:
            return Level.OK, "off: serve.enabled is false"
        if self._locked:
            return Level.OK, "in use by the running daemon"
        return Level.OK, ", ".join(_check_port(*port) for port in ports)


def _free_disk(folder: Path) -> int:
    """Bytes free on the disk of a folder that may not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def _resident_memory() -> int:
    """Bytes of this process, which has imported what a daemon imports."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _obstacle_to_create(path: Path) -> str | None:
    """What keeps this user from creating a file or folder that does not exist yet."""
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir():
        return f"{above} is not a folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"no write permission in {above}"


def _obstacle_to_append(file: Path) -> str | None:
    """What keeps this user from reading and appending to a file; None if it can, or if there is no such file."""
    try:
        file.open("r+b").close()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    return None


def _check_certificate(certificate: Path, key: Path | None) -> None:
    """Refuse what TLS cannot use."""
    for path in (certificate, key):
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{path}: cannot be read, but serve.tls_certfile or serve.tls_keyfile names it")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(
            f"serve.tls_certfile {certificate} and serve.tls_keyfile {key}: expected a PEM certificate chain and its "
            f"unencrypted key, found: {error}"
        ) from error


def _check_port(key: str, host: str, port: int) -> str:
    """Refuse an address that cannot be bound."""
    if port == 0:
        return f"{host}, any free port"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be bound: {error.strerror}; set {key}") from error
    return f"{host}:{port} is free"


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red", Level.SKIPPED: "dim"}


def finding_row(finding: Finding) -> Table:
    """A finding as one row for a terminal; a long text wraps within its column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=12)
    table.add_column(width=8)
    table.add_column(overflow="fold")
    table.add_row(finding.name, Text(finding.level, style=STYLES[finding.level]), Text(finding.text))
    return table


def check_backbone(settings: Settings) -> str:
    """Check backbone, adapter, publication and trackers as a start does, and return the result as one sentence.

    A hub model that is not on this machine is not fetched; its adapter is then not checked.

    Raises:
        ConfigError: `run` would refuse one of them.
    """
    config = adapter_of(settings)
    _check_device_name(settings.backbone.device)
    name = settings.backbone.model
    shape = None if locate(settings.backbone) is None else outline(settings.backbone)
    if shape is not None:
        check(config, shape.linears, shape.tower_linears)
    publishing.check(settings, config, shape)
    tracking.check(settings)
    if shape is None:
        return f"valid; backbone {name} would be fetched on first start, adapter not checked"
    activated = activated_parameters(config, shape.linears)
    return f"valid; adapter {settings.adapter.preset} fits {name}, {activated:,} parameters activated per token"


def _check_device_name(name: str) -> None:
    """Refuse a device that no machine has. Whether this machine has it is for `doctor` to check."""
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"backbone.device: expected auto, cpu, cuda or cuda:N, found {name!r}") from error
