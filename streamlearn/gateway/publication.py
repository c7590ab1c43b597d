"""Taking up publications while requests are answered.

1. Once a second the folder is examined, in a worker thread.
2. A new publication is read completely beside the one in use. If it cannot be read, the old one stays in use, and
   reading is tried again.
3. If no server has one of its versions, the old publication stays in use for as long as its own versions are all
   served: then one is complete and the other is not. Otherwise the new one is taken up.
4. It replaces the old one in one assignment. Requests keep the publication under which they began.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from streamlearn.errors import PublicationError
from streamlearn.events import Event, get_logger
from streamlearn.gateway.upstreams import Fleet, GatewayMetrics

if TYPE_CHECKING:
    pass
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from streamlearn.errors import RecordError
from streamlearn.http.guards import ApiError
from streamlearn.publish import publication as routing_state
from streamlearn.publish.publication import FILE, Publication, PublishedRegime, load_tokenizer
from streamlearn.settings import StreamSettings
from streamlearn.shift.features import Featurizer, input_of_prompt
from streamlearn.shift.monitor import MonitorState
from streamlearn.shift.routing import RequestClassifier
from streamlearn.stream.decode import Decoder

INTERVAL_S = 1.0


_log = get_logger("gateway")


class PublicationWatch:
    """The publication in use. Used by one event loop."""

    def __init__(self, folder: Path, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self.current: LoadedPublication | None = None
        """The publication for requests that begin now; None before the first."""
        self.refusal = f"{folder}: not read yet"
        """Why the newest publication is not in use, for as long as there is none."""
        self._path = folder
        self._folder: PublishedFolder | None = None
        self._fleet = fleet
        self._metrics = metrics
        self._next: LoadedPublication | None = None
        self._version: object = None
        self._refused: tuple[object, str] | None = None
        self._delayed = -1

    async def run(self) -> None:
        """Examine the folder again and again, until cancelled."""
        while True:
            try:
                await self.examine()
            except Exception:  # noqa: BLE001 - what is in use stays in use, and the next publication may be better
                _log.exception(Event.PUBLICATION_REFUSED, reason="unexpected")
            await asyncio.sleep(INTERVAL_S)

    async def examine(self) -> None:
        """Steps 1 to 4, once."""
        if self._folder is None:
            self._folder = await asyncio.to_thread(_opened, self._path)
        version = await asyncio.to_thread(self._folder.version)  # 1.
        if version is None or version != self._version:
            await self._read(self._folder, version)
        if self._next is not None and await self._may_replace(self._next):
            self._take_up(self._next)

    async def _read(self, folder: "PublishedFolder", version: object) -> None:
        """Step 2."""
        try:
            self._next = await asyncio.to_thread(folder.load)
        except PublicationError as error:
            if (version, str(error)) != self._refused:
                self._refused = version, str(error)
                self.refusal = str(error)
                self._metrics.refusals.inc()
                _log.warning(Event.PUBLICATION_REFUSED, reason=self.refusal)
            return
        self._version = version

    async def _may_replace(self, new: "LoadedPublication") -> bool:
        """Step 3."""
        if self.current is None:
            return True
        old_models, new_models = ({*each.publication.adapters} for each in (self.current, new))
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

    def _take_up(self, new: "LoadedPublication") -> None:
        """Step 4."""
        self.current, self._next, self.refusal = new, None, ""
        publication = new.publication
        self._metrics.publication.set(publication.sequence)
        _log.info(
            Event.PUBLICATION_TAKEN_UP,
            sequence=publication.sequence,
            snapshot=publication.snapshot,
            adapters=publication.adapters,
        )


def _opened(folder: Path) -> "PublishedFolder":
    """Imported here, in a worker thread: tokenizers take most of a second, and the process answers in the meantime."""
    return PublishedFolder(folder)


# The part of a request that decides its regime.
#
# A prompt is text, token ids or a conversation, each as a record of the stream would hold it.


Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""Text, token ids, or messages with exactly the keys role and content."""
MAX_TOKEN = (1 << 31) - 1
MAX_PROMPTS = 128
"""Prompts of a request that is routed; routing takes about 1 ms each, however short they are."""


def completion_prompts(value: Any) -> list[Prompt]:
    """The prompts of a request to /v1/completions: one string, one list of token ids, or a list of either.

    Raises:
        ApiError: 400, it is neither, or holds more than `MAX_PROMPTS`.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [tuple(value)]
        _require_few(value)
        if all(isinstance(each, str) for each in value):
            return list(value)
        if all(isinstance(each, list) and each and _is_tokens(each) for each in value):
            return [tuple(each) for each in value]
    raise invalid("prompt", "prompt must be a string, a list of token ids, or a list of either, and not be empty")


def messages_prompt(value: Any) -> Prompt:
    """The conversation of a request to /v1/chat/completions; fields other than role and content decide nothing.

    Raises:
        ApiError: 400, it is no conversation, or not one of text.
    """
    if not isinstance(value, list) or not value:
        raise invalid("messages", "messages must be a list of at least one message")
    return tuple(_message(each, f"messages[{index}]") for index, each in enumerate(value))


def invalid(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, "invalid", message, param=param)


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise invalid(where, f"{where} must be an object with a role and a content")
    return {"role": value["role"], "content": _text(value.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    """The text of a content. Parts are joined by line breaks, as vLLM joins them."""
    if content is None:  # an assistant's turn that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(each, f"{where}[{index}]") for index, each in enumerate(content))
    raise invalid(where, f"{where} must be a string or a list of parts")


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ApiError(
        400,
        "not_text",
        f"{where} must be a part of type text: only text can be routed",
        hint="name the model of a regime, or the backbone, to send it unrouted",
        param=where,
    )


def _require_few(prompts: Sequence[Any]) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(
            400,
            "invalid",
            f"prompt must hold at most {MAX_PROMPTS} prompts to be routed, found {len(prompts)}",
            hint="send several requests, or name the model of a regime, or the backbone, to send it unrouted",
            param="prompt",
        )


def _is_tokens(value: Sequence[Any]) -> bool:
    return all(type(each) is int and 0 <= each <= MAX_TOKEN for each in value)


class RoutedPrompt(NamedTuple):
    """What a prompt was taken for."""

    regime: PublishedRegime | None
    """The regime that explains it; None if none does."""
    score: float
    """Share of the likeliest regime's own records that are explained no better, 0 to 1."""


# Routing of requests by a published state: the daemon's own encoding, features, classifier and threshold.
#
# It has no model. The same prompt gets the same regime and score here and from the daemon's `/v1/route`, as of the
# snapshot that was published.


_UNLIMITED = 1 << 40
_LIMITS = StreamSettings(max_string_chars=_UNLIMITED, max_tokens=_UNLIMITED, batch_tokens=_UNLIMITED)
"""The body's size is limited already, and the model servers have limits of their own."""


def decoder_of(tokenizer: Any) -> Decoder:
    """The daemon's encoding of prompts, with this tokenizer."""
    return Decoder(tokenizer, _LIMITS, vocab_size=len(tokenizer))


class Router:
    """The regimes of one publication. Safe to use from several threads."""

    def __init__(self, publication: Publication, state: MonitorState, decoder: Decoder) -> None:
        self._threshold = publication.max_known_rejected
        self._by_slot = {each.slot: each for each in publication.regimes}
        self._featurizer = Featurizer(publication.seed)
        self._classifier = RequestClassifier.from_state(state.detector) if state.detector.regimes else None
        self._decoder = decoder

    def route(self, prompt: Prompt) -> RoutedPrompt:
        """The regime that explains a prompt, if any.

        Raises:
            ApiError: 400, the prompt cannot be encoded.
        """
        ids = self._encode(prompt)
        if self._classifier is None:  # before the first record nothing is known
            return RoutedPrompt(None, 0.0)
        assigned = self._classifier.assign(self._featurizer.featurize(ids))
        known = assigned.p_value >= self._threshold
        return RoutedPrompt(self._by_slot[assigned.slot] if known else None, assigned.p_value)

    def _encode(self, prompt: Prompt) -> np.ndarray[Any, np.dtype[np.int32]]:
        if prompt and isinstance(prompt, tuple) and isinstance(prompt[0], int):
            return np.array(prompt, dtype=np.int32)
        try:
            return input_of_prompt(self._decoder.prompt(prompt))  # type: ignore[arg-type]  # text or messages
        except RecordError as error:
            raise ApiError(400, "unusable_prompt", str(error), hint="name a model to send it unrouted") from error


# The names of models: what a client may ask for, and what it is answered by.
#
# streamlearn                  routed: the regime that explains the prompt, or the backbone
# streamlearn-regime-3         the regime's current version, or the backbone while none is published
# streamlearn-regime-3@184     this version, while a model server has it
# the backbone's own name      the untouched backbone


class Target(NamedTuple):
    """What answers a request."""

    model: str
    """The name under which model servers serve it: a version, or the backbone."""
    regime: int | None = None
    """Number of the regime that the request belongs to; None if no regime explains it, or it asked for the backbone."""
    score: float | None = None
    """Its score; None if it was not routed."""

    @property
    def unversioned(self) -> str:
        """The model without its version, of which there are few."""
        return self.model.partition("@")[0] if self.regime is not None else self.model


class ModelNames:
    """The names that one publication defines."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._by_model = {publication.model_of(each): each for each in publication.regimes}

    def is_routed(self, model: str) -> bool:
        """Whether requests for this model are routed."""
        return model == self._publication.name

    def routed(self, found: RoutedPrompt) -> Target:
        """What answers a routed prompt."""
        return self._current(found.regime)._replace(score=found.score)

    def named(self, model: str, served: Iterable[str]) -> Target:
        """What answers a request for a model that is not routed; `served` are the models that model servers have.

        Raises:
            ApiError: 404, there is no such model.
        """
        if model == self._publication.backbone:
            return Target(model)
        if model in self._by_model:
            return self._current(self._by_model[model])
        if model in self._versions(served):
            return Target(model, _number(model))
        raise ApiError(
            404,
            "model_not_found",
            f"the model {model[:200]!r} does not exist",
            hint="GET /v1/models lists those that do",
            param="model",
        )

    def rows(self, served: Iterable[str]) -> list[dict[str, Any]]:
        """The models as OpenAI lists them."""
        own = self._publication
        names = [own.name, own.backbone, *self._by_model, *sorted(self._versions(served))]
        created = int(own.written_at.timestamp())
        return [{"id": name, "object": "model", "created": created, "owned_by": own.name} for name in names]

    def _current(self, regime: PublishedRegime | None) -> Target:
        if regime is None:
            return Target(self._publication.backbone)
        return Target(regime.adapter or self._publication.backbone, regime.number)

    def _versions(self, served: Iterable[str]) -> frozenset[str]:
        """The published versions, and others that model servers still have."""
        return frozenset({*self._publication.adapters, *self._others(served)})

    def _others(self, served: Iterable[str]) -> Iterator[str]:
        prefix = f"{self._publication.name}-regime-"
        for model in served:
            number, at, version = model.removeprefix(prefix).partition("@")
            if model.startswith(prefix) and number.isdecimal() and at and version:
                yield model


def _number(version: str) -> int:
    return int(version.partition("@")[0].rpartition("-")[2])


_FileVersion = tuple[str, int, int, int]
"""Path, inode, size, and time of the last change in ns."""


class LoadedPublication(NamedTuple):
    """A publication, ready to route."""

    publication: Publication
    names: ModelNames
    router: Router


class PublishedFolder:
    """One published folder. Its methods block on the disk; one thread at a time calls them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoder: tuple[tuple[_FileVersion, ...], Decoder] | None = None

    def version(self) -> _FileVersion | None:
        """What changes with every publication; None while there is none."""
        return _version(self._folder / FILE)

    def load(self) -> LoadedPublication:
        """Read the current publication. The tokenizer is read again only if its files changed.

        Raises:
            PublicationError: there is none, or a part of it is missing or damaged.
        """
        publication = Publication.read(self._folder)
        state = routing_state.read(self._folder, publication)
        router = Router(publication, state, self._decoder_of(publication))
        return LoadedPublication(publication, ModelNames(publication), router)

    def _decoder_of(self, publication: Publication) -> Decoder:
        folder = self._folder / publication.tokenizer
        files = tuple(version for path in sorted(folder.glob("*")) if (version := _version(path)) is not None)
        if self._decoder is None or self._decoder[0] != files:
            try:
                self._decoder = files, decoder_of(load_tokenizer(folder))
            except Exception as error:  # the loader raises what its parsers raise
                raise PublicationError(f"{folder}: the tokenizer cannot be read: {error}") from error
        return self._decoder[1]


def _version(path: Path) -> _FileVersion | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_DEPTH = 254
"""Objects and arrays within one another, the body among them, that orjson writes."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request to `path`, which is CHAT or TEXT."""

    path: str
    model: str
    """The model that the client asks for."""
    stream: bool
    """Whether the answer comes in parts."""
    fields: dict[str, Any]
    """All fields as received."""
    num_bytes: int
    """Size of the body."""

    @classmethod
    def parse(cls, path: str, body: bytes) -> "CompletionRequest":
        """Read a body.

        Raises:
            ApiError: 400, it is not JSON, not an object, or names no model.
        """
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, "not_json", f"the body must be JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "invalid", "the body must be a JSON object")
        model = fields.get("model")
        if not isinstance(model, str):
            raise invalid("model", "model must be the name of a model; GET /v1/models lists them")
        if not isinstance(fields.get("stream") or False, bool):
            raise invalid("stream", "stream must be true or false")
        return cls(path, model, bool(fields.get("stream")), fields, len(body))

    def prompts(self) -> Sequence[Prompt]:
        """What decides the regime, one per prompt.

        Raises:
            ApiError: 400, a prompt cannot be routed.
        """
        if self.path == CHAT:
            return [messages_prompt(self.fields.get("messages"))]
        return completion_prompts(self.fields.get("prompt"))

    def body_for(self, model: str) -> bytes:
        """The body with another model.

        Raises:
            ApiError: 400, its fields are nested too deeply.
        """
        try:
            return orjson.dumps({**self.fields, "model": model})
        except orjson.JSONEncodeError as error:  # orjson reads four times as deep as it writes
            raise ApiError(400, "invalid", f"the body must be nested at most {MAX_DEPTH} deep") from error
