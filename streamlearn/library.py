"""The learner as a Python object: learns from any iterable of records, without a daemon around it.

The loop, the state folder and the snapshots are the daemon's own, so either continues what the other has saved. Nothing
here starts a thread or a server, handles a signal or configures logging; warnings go through `warnings`.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter
from tqdm import tqdm

from connectors.iterable import IterableSource, iterate, to_json
from streamlearn.backbone.load import adopt
from streamlearn.board import Board, Clock
from streamlearn.callbacks import CallbackObserver
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import ConfigError, RecordError, SnapshotError, UsageError
from streamlearn.export.export import Exporter, ExportOptions
from streamlearn.export.formats import BaseModel
from streamlearn.jobs.queue import EvalJob, ExampleError, ExampleResult, GenerateJob, JobQueue, PromptInput, RouteJob
from streamlearn.jobs.runner import evaluate, generate, route
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Step
from streamlearn.model_files import pinned
from streamlearn.series import HistoryPoint
from streamlearn.settings import Settings
from streamlearn.settings.settings import checked
from streamlearn.snapshot.manifest import PASSED, another_model
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.status import Phase, RegimeStatus, Requested, Route, ShiftStatus, Status
from streamlearn.stream.parse import parse

Record = Mapping[str, Any]
"""A record in one of the forms that the daemon reads, such as {"prompt": ..., "completion": ...}."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with role and content."""
_POINTS = TypeAdapter(tuple[HistoryPoint, ...])


@dataclass(frozen=True)
class Update:
    """One batch that was learned."""

    step: int
    """Updates made so far, this one included."""
    loss: float | None
    """Prequential loss: of the batch before it was learned, nats per learned token; None if all of it was held out."""
    regime: int | None
    """Number of the regime of its last record; None if it is no longer remembered."""
    regimes: tuple[int | None, ...]
    """The same of each record."""
    shift: ShiftStatus | None
    """The shift that was acted on before it, the last one if there were several; the first regime is none."""
    records: int
    """Its records, with those held out."""
    tokens: int
    """Tokens that were trained on."""
    refusal: str | None = None
    """Why the weights were not changed; None if they were."""


@dataclass(frozen=True)
class Regime:
    """A regime that is remembered."""

    number: int
    """Unique; never reused."""
    name: str
    """Label for people; empty without one."""
    records: int
    """Its records so far."""
    loss: float | None
    """Loss of its newest records before each was learned, nats per learned token, smoothed."""
    accuracy: float | None
    """Share of the learned tokens of its hold-out records that are the most probable ones, 0 to 1; None before they
    were scored."""
    forgotten: float | None
    """Best accuracy since the stream left it, less the present one; None before."""

    @classmethod
    def from_status(cls, status: RegimeStatus) -> Self:
        """The part of a regime's status that is shown here."""
        now = status.now
        is_scored = now is not None and status.best_accuracy is not None
        return cls(
            status.number,
            status.name,
            status.records,
            status.prequential_loss,
            None if now is None else now.accuracy,
            status.best_accuracy - now.accuracy if is_scored else None,  # type: ignore[operator, union-attr]
        )


@dataclass(frozen=True)
class Scores:
    """Scores of some examples."""

    examples: int
    loss: float
    """Nats per learned token."""
    accuracy: float
    """Share of learned tokens that were the most probable ones, 0 to 1."""
    score: float | None
    """Mean ROUGE-L F1 of generated answers, 0 to 1; None without `generate`."""


@dataclass(frozen=True)
class Evaluation(Scores):
    """Scores of all examples, and by the regime that each was routed to."""

    by_regime: Mapping[int | None, Scores]
    """By number; None: examples that match no regime."""


class History:
    """The past of the run, a row for each batch; old rows are joined, so that it stays bounded."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        """Oldest first; the columns are the fields of `series.HistoryPoint`."""

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed (extra `pandas`).
        """
        import pandas as pd  # noqa: PLC0415 - optional

        return pd.DataFrame(self.rows)


class Learner:
    """A frozen model that keeps learning from records, without task boundaries.

    >>> learner = Learner("builtin:nano", learner={"lr": 0.01}, progress=False)
    >>> updates = [update for update in learner.learn([{"prompt": "2 + 2 =", "completion": " 4"}] * 24)]
    >>> learner.regimes[0].records
    24
    >>> learner.close()
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        state: str | Path | None = None,
        preset: str | None = None,
        revision: str | None = None,
        start: str | Path | None = None,
        device: str | None = None,
        callbacks: Sequence[Any] = (),
        progress: bool = True,
        accept_config_change: bool = False,
        **settings: Any,
    ) -> None:
        """Load the model, and continue from the newest snapshot in `state` if there is one.

        Args:
            model: A folder, `builtin:nano`, a hub id, or a causal language model of transformers, which is changed in
                place: frozen, with experts beside its linears.
            tokenizer: The tokenizer of a model that is loaded already.
            state: Folder of the snapshots, as the daemon's; None: nothing is kept.
            preset: `adapter.preset`.
            revision: Commit of a hub id; by default the one that its branch `main` names, which is then pinned.
            start: A LoRA that PEFT saved, from which every regime begins: a folder or a hub id, as `adapter.start`.
            device: `backbone.device`.
            callbacks: See `streamlearn.callbacks.Callback`.
            progress: Whether a bar is shown in a terminal and a notebook.
            accept_config_change: Continue though settings that decide what is learned have changed.
            **settings: The sections and keys of a configuration file: `learner={"lr": 0.002}`, `seed=1`. A `source` is
                only needed to learn from what the daemon reads.

        Raises:
            ConfigError: a setting is wrong, the model cannot be used, or the snapshot belongs to another setup.
            SnapshotError: the state cannot be read or written.
            StateLockedError: a daemon, or another learner, uses the folder.
        """
        is_name = isinstance(model, str | Path)
        if is_name and tokenizer is not None:
            raise ConfigError("tokenizer: must be given with a model that is loaded already, and only then")
        values = settings | {name: _section(name, settings.get(name)) for name in ("backbone", "adapter")}
        if is_name:
            values["backbone"] |= _located(str(model), revision)
        if start is not None:
            located = _located(str(start))
            values["adapter"] |= {"start": located["model"], "start_revision": located.get("revision")}
        if device is not None:
            values["backbone"]["device"] = device
        if preset is not None:
            values["adapter"]["preset"] = preset
        loaded = None if is_name else (model, tokenizer)
        self._build(values, state, callbacks, progress=progress, accept=accept_config_change, loaded=loaded)

    @classmethod
    def open(
        cls,
        state: str | Path,
        *,
        device: str = "auto",
        callbacks: Sequence[Any] = (),
        progress: bool = True,
    ) -> Self:
        """Continue from the newest snapshot in a state folder, also a daemon's, with the settings that made it.

        Raises:
            SnapshotError: the folder has no snapshot, or only damaged ones.
            ConfigError: the model is no longer where it was; or it was a loaded one, whose run
                `Learner(model, tokenizer=tokenizer, state=state)` continues.
            StateLockedError: a daemon, or another learner, uses the folder.
        """
        store = SnapshotStore(Path(state) / "snapshots", keep=1)
        snapshot = store.newest() if store.folder.is_dir() else None
        if snapshot is None:
            raise SnapshotError(f"{state}: must be the state folder of a run, found no snapshot in it")
        if PASSED in snapshot.manifest.backbone:
            raise another_model(snapshot.manifest, found="none")
        values: dict[str, Any] = {**snapshot.manifest.config}
        values["backbone"] = {**values["backbone"], "device": device}
        opened = cls.__new__(cls)
        opened._build(values, state, callbacks, progress=progress, accept=False, loaded=None)
        return opened

    def _build(
        self,
        values: dict[str, Any],
        state: str | Path | None,
        callbacks: Sequence[Any],
        *,
        progress: bool,
        accept: bool,
        loaded: tuple[Any, Any] | None,
    ) -> None:
        self._source = None if "source" in values else IterableSource()
        unread = {"jsonl": {"path": os.devnull}}  # a configuration needs a source
        self._is_kept = state is not None
        with ExitStack() as opened:
            folder = state or opened.enter_context(TemporaryDirectory(prefix="streamlearn-"))
            settings = checked({"source": unread, **values, "state": folder}, Path.cwd())
            backbone = None if loaded is None else adopt(*loaded, settings.adapter)
            self._components = opened.enter_context(
                closing(Components(settings, accept_config_change=accept, source=self._source, backbone=backbone))
            )
            self._observer = CallbackObserver(callbacks)
            board = Board(Status(Phase.STARTING), Clock())
            self._daemon = Daemon(self._components, board, JobQueue(1), observer=self._observer)
            self._daemon.start()
            self._opened = opened.pop_all()
        self._is_closed = False
        self.settings: Settings = self._components.settings
        self._progress = progress

    def learn(self, records: Iterable[Record] | None = None) -> Iterator[Update]:
        """Learn from records, in their order; yields after every batch.

        Without `records` they are read from the configured `source`, until it ends.

        Shifts are detected ahead of training, so a batch comes some records after it was read. A loop that is left
        early keeps what was read, and the next call goes on with it, then reads its own records; an error that ended
        the iterable before is not raised. At the end everything is learned, each regime's hold-out records are scored,
        and a learner with a state folder is saved. A record that cannot be used is warned of and left out; a batch of
        nothing else yields no update.

        Raises:
            TypeError: `records` is a single record, or no iterable.
            UsageError: something in `records` is no dict that JSON can hold; or there are none, and no `source`; or
                another call has begun to read other records.
            SourceError: the configured source cannot be read; or updates stayed non-finite, and records of an iterable
                would have to be read again.
            DivergedError: updates are still not finite after a rollback.
        """
        self._check_open("learn")
        daemon, observer = self._daemon, self._observer
        if (records is None) == (self._source is not None):
            raise UsageError("learn: must be given records, or the learner a setting `source`, and not both")
        if self._source is not None and records is not None:
            self._source.feed(records)
        reading = self._source and self._source.records
        observer.begin(daemon.learner.number)
        with self._bar(len(records) if isinstance(records, Sized) else None) as bar:
            for batch in daemon.batches():
                step = daemon.advance(batch)
                regimes = tuple(map(self._components.adaptation.numbers.get, batch.slots))
                if not regimes:  # none of its records could be used
                    continue
                update = _update(daemon.learner.number, step, regimes, observer.shift)
                observer.shift = None
                bar.update(len(regimes))
                if update.loss is not None:
                    bar.set_postfix(loss=f"{update.loss:.2f}", regime=update.regime, refresh=False)
                observer.updated(update.step, loss=update.loss, regime=update.regime, shift=update.shift is not None)
                yield update
                self._check_open("learn")
                if self._source is not None and self._source.records is not reading:
                    raise UsageError("learn: must not go on after another call of learn, which ended this loop")
                if observer.stopped:
                    break
        daemon.score_all()
        if self._is_kept:
            self.save()
        observer.end()

    def _bar(self, total: int | None) -> Any:
        """A progress bar; nothing is shown where nobody looks."""
        if not (self._progress and (sys.stderr.isatty() or "ipykernel" in sys.modules)):
            return tqdm(disable=True)
        from tqdm.auto import tqdm as shown  # noqa: PLC0415 - warns in a notebook without widgets

        return shown(total=total, unit="record")

    @property
    def regimes(self) -> list[Regime]:
        """The regimes that are remembered, by number."""
        return list(map(Regime.from_status, self._components.adaptation.status().regimes))

    @property
    def shifts(self) -> list[ShiftStatus]:
        """The newest shifts, oldest first, the entry into the first regime among them."""
        return list(self._components.adaptation.status().shifts)

    @property
    def history(self) -> History:
        """The past of the run, a row for each batch."""
        return History(_POINTS.dump_python(self._components.history.status.points))

    @property
    def records(self) -> int:
        """Records that are done. A run that was saved and opened again goes on with the record after them."""
        return self._daemon.state.records

    @property
    def peft_model(self) -> Any:
        """The `PeftModel`, for what this class does not do; the adapter of regime N is not always its active one."""
        return self._components.model.peft

    def route(self, prompt: str | Conversation) -> Route:
        """Find the regime of a prompt or a conversation, and whether it is `known`; no forward pass is made.

        Raises:
            RecordError: it cannot be encoded.
            TypeError: it is neither a text nor messages.
        """
        work = route(RouteJob((_prompt(prompt),)), *self._parts("route"))
        return run_to_end(work).routes[0]

    def generate(
        self,
        prompt: str | Conversation,
        *,
        max_new_tokens: int = 64,
        regime: int | None = None,
        backbone: bool = False,
        stop: Sequence[str] = (),
    ) -> str:
        """Continue a prompt, or answer a conversation, greedily; returns the new text.

        Args:
            prompt: A text, or messages.
            max_new_tokens: At most so many tokens.
            regime: Number of the regime to answer with; by default what the prompt is routed to.
            backbone: Answer with the backbone instead, with `start` if there is one.
            stop: Strings that end the text.

        Raises:
            RecordError: the prompt cannot be encoded.
            TypeError: the prompt is neither a text nor messages, or `stop` is a single string.
            UnknownRegimeError: there is no such regime.
            UsageError: both a regime and the backbone are asked for.
        """
        if backbone and regime is not None:
            raise UsageError(f"generate: must be given a regime or backbone=True, found both, with regime {regime}")
        if isinstance(stop, str):
            raise TypeError(f"stop: must be a list of strings, found the string {stop!r}")
        requested: Requested = "backbone" if backbone else "routed" if regime is None else regime
        given = _prompt(prompt)
        job = GenerateJob(
            given.prompt, given.messages, max_new_tokens=max_new_tokens, requested=requested, stop=tuple(stop)
        )
        return run_to_end(generate(job, *self._parts("generate"))).text

    def evaluate(self, examples: Iterable[Record], *, generate: bool = False, max_new_tokens: int = 64) -> Evaluation:
        """Score examples under what they are routed to; nothing is learned.

        Args:
            examples: At least one record with something to learn.
            generate: Whether answers are generated and compared with the expected ones.
            max_new_tokens: Maximum tokens of an answer.

        Raises:
            ExampleError: an example is unusable, as a record of `learn` would be; the message has its index.
            TypeError: `examples` is a single record, or no iterable.
            UsageError: there is none, or something in `examples` is no dict that JSON can hold.
        """
        parts = self._parts("evaluate")
        given = tuple(self._example(index, value) for index, value in enumerate(iterate(examples)))
        if not given:
            raise UsageError("evaluate: must be given at least one example, found none")
        job = EvalJob(given, generate=generate, max_new_tokens=max_new_tokens)
        pack_tokens = self.settings.stream.batch_tokens
        results = run_to_end(evaluate(job, *parts, pack_tokens=pack_tokens)).per_example
        groups: dict[int | None, list[ExampleResult]] = defaultdict(list)
        for result in results:
            groups[result.route.regime if result.route.known else None].append(result)
        by_regime = {number: _scores(groups[number]) for number in sorted(groups, key=lambda n: (n is None, n or 0))}
        return Evaluation(**asdict(_scores(results)), by_regime=by_regime)

    def export(self, out: str | Path, *, regime: int | None = None, approximate: bool = False) -> list[Path]:
        """Write regimes as plain LoRAs for stock PEFT, each into a new folder in `out`; returns the folders.

        Args:
            out: Folder, made if it does not exist.
            regime: Number of one regime; by default all.
            approximate: Whether experts among which tokens choose may be replaced by their mean.

        Raises:
            UsageError: there is no such regime, its folder exists, or it cannot be written without loss.
            SnapshotError: a folder cannot be written.
        """
        self._check_open("export")
        components = self._components
        base = BaseModel.from_settings(self.settings.backbone, components.shape)
        exporter = Exporter(
            components.learner,
            components.adaptation,
            f"step {components.learner.number}",
            datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 - for people
            components.shape,
            self.settings,
            ExportOptions(Path(out), "peft", base, approximate=approximate),
        )
        slots = exporter.slots([] if regime is None else [regime])
        return [Path(out) / exporter.export(slot).name for slot in slots]

    def save(self) -> Path:
        """Write a snapshot, from which a daemon or `open` continues; returns its folder.

        Raises:
            UsageError: the learner has no state folder.
            SnapshotError: it cannot be written; the snapshot before it is untouched.
        """
        self._check_open("save")
        if not self._is_kept:
            raise UsageError("save: the learner must have a folder to save to: Learner(..., state=FOLDER)")
        return self._components.store.folder / self._daemon.save().name

    def close(self) -> None:
        """Release the state folder. What was learned since the last snapshot is lost. Safe to call twice.

        Regimes, shifts, history and `peft_model` can still be read; every method raises UsageError.
        """
        self._is_closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _example(self, index: int, value: object) -> Mapping[str, Any]:
        """An example in the form that `learn` would decode."""
        try:
            return parse(to_json(value, f"example {index}"), self.settings.stream)
        except RecordError as error:
            raise ExampleError(index, error) from error

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise UsageError(
                f"{method}: the learner must be open, found it closed; continue a saved run with Learner.open(FOLDER)"
            )

    def _parts(self, method: str) -> tuple[Any, Any, Any]:
        self._check_open(method)
        components = self._components
        return components.learner, components.decoder, components.adaptation.route


def _update(step: int, done: Step | None, regimes: tuple[int | None, ...], shift: ShiftStatus | None) -> Update:
    if done is None:
        return Update(step, None, regimes[-1], regimes, shift, len(regimes), 0)
    return Update(step, done.loss, regimes[-1], regimes, shift, len(regimes), done.tokens, done.refusal)


def _scores(examples: Sequence[ExampleResult]) -> Scores:
    tokens = sum(example.tokens for example in examples)
    scores = [example.rouge_l for example in examples if example.rouge_l is not None]
    return Scores(
        len(examples),
        sum(example.loss * example.tokens for example in examples) / tokens,
        sum(example.token_accuracy * example.tokens for example in examples) / tokens,
        fmean(scores) if scores else None,
    )


def _prompt(given: str | Conversation) -> PromptInput:
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"prompt: must be a text or a list of messages, found {type(given).__name__}")
    return PromptInput(given, None) if isinstance(given, str) else PromptInput(None, tuple(given))


def _section(name: str, values: object) -> dict[str, Any]:
    """A copy of a section's values; None is an empty section, as in a configuration file.

    Raises:
        ConfigError: they are no mapping.
    """
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{name}: expected a mapping of keys to values, found {type(values).__name__}")
    return dict(values or {})


def _located(model: str, revision: str | None = None) -> dict[str, str]:
    """The settings of a model by its name; a folder stays what it is wherever the program changes to.

    Raises:
        ConfigError: no commit of a hub id is known here, and the hub cannot be asked.
    """
    folder = Path(model).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else model
    commit = pinned(name, revision)
    return {"model": name} if commit is None else {"model": name, "revision": commit}
