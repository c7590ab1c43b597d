"""The publication in use: read from a folder, replaced while requests are answered, and how it routes.

1. Once a second the folder is examined, in a worker thread. From an object store, the newest publication is first
   copied to a folder of this process, every `STORE_INTERVAL_S`.
2. A new publication is read completely while the current one stays in use. If it cannot be read, reading is retried.
3. If no server has one of its versions, the current publication stays in use for as long as all its own versions are
   served: then one is complete and the other is not. Otherwise the new one is used.
4. It replaces the current one in one assignment. Requests keep the publication under which they began.
5. With a canary, the one before it goes on answering the other share of the requests, until the next publication, or
   until its versions are no longer served. A publication that withdraws a version is used by all at once.

Routing has no model. The same prompt gets the same regime and score here and from the daemon's `/v1/route`, as of the
snapshot that was published.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from streamlearn.errors import PublicationError, RecordError
from streamlearn.events import Event, get_logger
from streamlearn.gateway.upstreams import Fleet, GatewayMetrics
from streamlearn.http.responses import ApiError
from streamlearn.model_files import load_tokenizer
from streamlearn.publish.objects import ObjectStore
from streamlearn.publish.publication import (
    FILE,
    Publication,
    PublishedRegime,
    read_routing,
    read_vectors,
    version_pattern,
)
from streamlearn.settings import StreamSettings
from streamlearn.shift.features import Featurizer, input_of_prompt
from streamlearn.shift.monitor import MonitorState
from streamlearn.shift.routing import RequestClassifier
from streamlearn.stream.decode import Decoder

INTERVAL_S = 1.0
STORE_INTERVAL_S = 5.0  # each look is a request that stores charge for
_UNLIMITED = 1 << 40
_LIMITS = StreamSettings(max_string_chars=_UNLIMITED, max_tokens=_UNLIMITED, batch_tokens=_UNLIMITED)
"""The body's size is limited already, and the model servers have limits of their own."""

Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""Text, token ids, or messages with exactly the keys role and content."""

_log = get_logger("gateway")


class Target(NamedTuple):
    """What answers a request."""

    model: str
    """The name under which model servers serve it: a version, or the backbone."""
    regime: int | None = None
    """Number of the regime that the request belongs to; None if no regime explains it, or it named the backbone."""
    score: float | None = None
    """Share of the likeliest regime's own records that are explained no better, 0 to 1; None if it was not routed."""
    likeliest: int | None = None
    """Number of the likeliest regime, whether it explains the request or not; None if it was not routed."""

    @property
    def unversioned(self) -> str:
        """The model without its version, a label with few values."""
        return self.model.partition("@")[0] if self.regime is not None else self.model


class LoadedPublication:
    """A publication, ready to route, and the names that it defines. Safe to use from several threads.

    streamlearn                        routed: the regime that explains the prompt, or the backbone
    streamlearn-regime-3               the regime's current version, or the backbone while none is published
    streamlearn-regime-3@184-5d3c1f    this version, while a model server has it
    the backbone's own name            the untouched backbone
    """

    def __init__(
        self, publication: Publication, state: MonitorState, decoder: Decoder, vectors_VD: NDArray[np.float16]
    ) -> None:
        self.publication = publication
        self._by_slot = {regime.slot: regime for regime in publication.regimes}
        self._by_model = {publication.model_of(regime): regime for regime in publication.regimes}
        self._featurizer = Featurizer(publication.seed, vectors_VD)
        self._classifier = RequestClassifier.from_state(state.detector) if state.detector.regimes else None
        self._decoder = decoder

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the current publication of a folder; blocks on the disk.

        Raises:
            PublicationError: there is none, or a part of it is missing or damaged.
        """
        publication = Publication.read(folder)
        tokenizer = folder / publication.tokenizer
        return cls(publication, read_routing(folder, publication), read_decoder(tokenizer), read_vectors(tokenizer))

    def is_routed(self, model: str) -> bool:
        return model == self.publication.name

    def route(self, prompt: Prompt) -> Target:
        """What answers a prompt: the regime that explains it, or else the backbone.

        Raises:
            ApiError: 400, the prompt cannot be encoded.
        """
        ids = self.encode(prompt)
        if self._classifier is None:  # before the first record nothing is known
            return Target(self.publication.backbone, score=0.0)
        assigned = self._classifier.assign(self._featurizer.featurize(ids))
        known = assigned.p_value >= self.publication.max_known_rejected
        likeliest = self._by_slot[assigned.slot]
        target = self._current(likeliest if known else None)
        return target._replace(score=assigned.p_value, likeliest=likeliest.number)

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """The tokens of a prompt by which it is routed. Raises like `route`."""
        if prompt and isinstance(prompt, tuple) and isinstance(prompt[0], int):
            return np.array(prompt, dtype=np.int32)
        try:
            return input_of_prompt(self._decoder.prompt(prompt))  # type: ignore[arg-type]  # text or messages
        except RecordError as error:
            raise ApiError(400, "unusable_prompt", str(error), hint="name a model to send it unrouted") from error

    def named(self, model: str, served: Iterable[str]) -> Target:
        """What answers a request for a model that is not routed; `served` are the models that model servers have.

        Raises:
            ApiError: 404, there is no such model.
        """
        if model == self.publication.backbone:
            return Target(model)
        if model in self._by_model:
            return self._current(self._by_model[model])
        if model in self._versions(served):
            return Target(model, int(model.partition("@")[0].rpartition("-")[2]))
        message, hint = f"the model {model[:200]!r} does not exist", "GET /v1/models lists the models"
        raise ApiError(404, "model_not_found", message, hint=hint, param="model")

    def rows(self, served: Iterable[str]) -> list[dict[str, Any]]:
        """The models as OpenAI lists them."""
        own = self.publication
        names = [own.name, own.backbone, *self._by_model, *sorted(self._versions(served))]
        created = int(own.written_at.timestamp())
        return [{"id": name, "object": "model", "created": created, "owned_by": own.name} for name in names]

    def _current(self, regime: PublishedRegime | None) -> Target:
        if regime is None:
            return Target(self.publication.backbone)
        return Target(regime.adapter or self.publication.backbone, regime.number)

    def _versions(self, served: Iterable[str]) -> set[str]:
        """The published versions, and others of the same run that model servers still have."""
        own = self.publication
        return {*own.adapters, *filter(version_pattern(own.name, [own.run]).fullmatch, served)}


@lru_cache(maxsize=1)  # reading takes longer than everything else, and a folder is named by its content
def read_decoder(folder: Path) -> Decoder:
    """The daemon's encoding of prompts, with the tokenizer in a folder."""
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as error:  # the loader raises what its parsers raise
        raise PublicationError(f"{folder}: the tokenizer cannot be read: {error}") from error
    return Decoder(tokenizer, _LIMITS, vocab_size=len(tokenizer))


class PublicationWatch:
    """The publication in use. Used by one event loop."""

    def __init__(self, published: Path | str, fleet: Fleet, metrics: GatewayMetrics, *, canary: float = 1.0) -> None:
        """Build the watch.

        Args:
            published: The published folder, or its URL in an object store.
            fleet: The model servers.
            metrics: What is counted.
            canary: Share of the requests that the newest publication gets.

        Raises:
            ConfigError: no client of the store is installed.
        """
        self.current: LoadedPublication | None = None
        """The newest publication; None before the first."""
        self._previous: LoadedPublication | None = None
        self._canary = canary
        self.refusal = f"{published}: not read yet"
        """Why the newest publication is not in use, while there is none."""
        self._store = ObjectStore(published, setting="--published") if isinstance(published, str) else None
        self._folder = Path(published)
        self._fleet = fleet
        self._metrics = metrics
        self._next: LoadedPublication | None = None
        self._version: object = None
        self._refused: tuple[object, str] | None = None
        self._delayed = -1

    async def run(self) -> None:
        """Examine the folder repeatedly, until cancelled."""
        with ExitStack() as resources:
            if self._store is not None:
                copy = TemporaryDirectory(prefix="streamlearn-gateway-", ignore_cleanup_errors=True)
                self._folder = Path(resources.enter_context(copy))
            while True:
                try:
                    await self.examine()
                except Exception:  # noqa: BLE001 - the current one stays in use, and the next publication may be better
                    _log.exception(Event.PUBLICATION_REFUSED, reason="unexpected")
                await asyncio.sleep(INTERVAL_S if self._store is None else STORE_INTERVAL_S)

    def choose(self, fields: Mapping[str, Any]) -> LoadedPublication | None:
        """The publication for a request with these fields; None before the first.

        Step 5. A hash of the prompt decides: it is the same for a request that is repeated, and on every gateway.
        """
        previous = self._previous
        if previous is None or not self._fleet.has_all(previous.publication.adapters):
            return self.current
        prompt = orjson.dumps([fields.get("prompt"), fields.get("messages")])
        share = int.from_bytes(hashlib.sha256(prompt).digest()[:8]) / (1 << 64)
        return self.current if share < self._canary else previous

    async def examine(self) -> None:
        """Steps 1 to 4, once."""
        if self._store is not None:
            try:
                await asyncio.to_thread(self._store.pull, self._folder)
            except PublicationError as error:
                self._refuse("store", error)
                return
        version = await asyncio.to_thread(version_of, self._folder / FILE)  # 1.
        if version is None or version != self._version:
            await self._read(version)
        if self._next is not None and await self._may_replace(self._next):
            self._use(self._next)

    async def _read(self, version: object) -> None:
        """Step 2."""
        try:
            self._next = await asyncio.to_thread(LoadedPublication.read, self._folder)
        except PublicationError as error:
            self._refuse(version, error)
            return
        self._version = version

    def _refuse(self, version: object, error: PublicationError) -> None:
        """Report why the newest publication cannot be read, once."""
        if (version, str(error)) != self._refused:
            self._refused = version, str(error)
            self.refusal = str(error)
            self._metrics.refusals.inc()
            _log.warning(Event.PUBLICATION_REFUSED, reason=self.refusal)

    async def _may_replace(self, new: LoadedPublication) -> bool:
        """Step 3."""
        if self.current is None:
            return True
        old_models, new_models = set(self.current.publication.adapters), set(new.publication.adapters)
        if not self._fleet.has_all(new_models):
            await self._fleet.poll()  # what was loaded just before the publication
        if self._fleet.has_all(new_models) or not self._fleet.has_all(old_models):
            return True
        sequence = new.publication.sequence
        if self._delayed != sequence:
            self._delayed = sequence
            missing = sorted(new_models - self._fleet.models)
            _log.warning(Event.PUBLICATION_DELAYED, sequence=sequence, not_served=missing)
        return False

    def _use(self, new: LoadedPublication) -> None:
        """Step 4."""
        old = self.current
        self._previous = old if self._canary < 1 and old is not None and _keeps_all(old, new) else None
        self.current, self._next, self.refusal = new, None, ""
        publication = new.publication
        self._metrics.publication.set(publication.sequence)
        _log.info(
            Event.PUBLICATION_TAKEN_UP,
            sequence=publication.sequence,
            snapshot=publication.snapshot,
            adapters=publication.adapters,
        )


def _keeps_all(old: LoadedPublication, new: LoadedPublication) -> bool:
    """Whether every regime with a version still has one: none was withdrawn, and the run is the same."""
    own, other = old.publication, new.publication
    versions = [{regime.number for regime in each.regimes if regime.adapter is not None} for each in (own, other)]
    return own.run == other.run and versions[0] <= versions[1]


def version_of(publication: Path) -> tuple[int, int, int] | None:
    """Changes with every publication, also with one of the same size within a tick; None while there is none."""
    try:
        status = publication.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
