"""From a record to what the learner trains on: token ids, and which of them are learned.

A record has one form: `text` (every token is learned), `prompt` + `completion` (the completion), `messages` (every
assistant turn), or `input_ids` with optional `labels`. `meta` passes unread and `sample_type` is left to others; key,
headers and timestamp are never looked at.

Text cannot forge a turn. Strings that name a control token, such as `<|im_end|>`, are encoded letter by letter wherever
a record writes them, and as the control token where the chat template does. So the decoder keeps two private copies of
the tokenizer's core: `encode_special_tokens`, which tells them apart, is a switch on the core that every call through
transformers may turn again.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from streamlearn.errors import ConfigError, Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import json_type, parse, read_integers, read_list, read_string
from streamlearn.stream.record import Record

IGNORED = -100
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 256  # each answer renders all messages before it: 256 of 4 kB, the worst, take 2 s
_FORM_OF = {
    "text": "text",
    "prompt": "prompt + completion",
    "completion": "prompt + completion",
    "messages": "messages",
    "input_ids": "input_ids",
    "labels": "input_ids",
}
_KNOWN = (*_FORM_OF, "meta", "sample_type")
_FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}"  # a replay must not depend on the day
_MARKS = range(0xE000, 0xF900)  # private use: one of them stands for a control token's name during rendering


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One record, ready to learn: `labels[t]` is the token at `t` itself, or -100 where nothing is learned."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_length(self) -> int:
        """Index of the first label."""
        return int(np.argmax(self.labels != IGNORED))


class _Draft(NamedTuple):
    """Tokens before truncation; `answer` is where the last completion starts, None where nothing is a prompt."""

    ids: list[int]
    labels: list[int]
    answer: int | None


class Decoder:
    """Bytes in, `Example` out; a record that cannot be used raises RecordError and nothing else."""

    def __init__(self, tokenizer: Any, settings: StreamSettings, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._encoder = _Encoder(tokenizer)
        self._drafts: dict[str, Callable[[Mapping[str, Any]], _Draft]] = {
            "text": self._text,
            "prompt + completion": self._prompt,
            "messages": self._messages,
            "input_ids": self._input_ids,
        }

    def decode(self, record: Record) -> Example:
        """The example in a record's value.

        Raises:
            RecordError: with the reason, what must hold and what was found.
        """
        return self.decode_value(parse(record.value, self._settings))

    def decode_value(self, value: Mapping[str, Any]) -> Example:
        """The same for an object that is parsed already, as in a request.

        Raises:
            RecordError: with the reason, what must hold and what was found.
        """
        kept = self._fit(*self._drafts[_form(value)](value))
        input_ids, labels = (np.array(tokens, dtype=np.int64) for tokens in kept)
        labels[:1] = IGNORED  # nothing predicts the first token
        if not (labels != IGNORED).any():
            raise RecordError(
                Reason.NOTHING_TO_LEARN, f"a record must hold a token to learn, found none in {len(labels)} tokens"
            )
        if input_ids.max() >= self._vocab_size:
            raise RecordError(
                Reason.TOKEN_OUT_OF_RANGE,
                f"the model knows tokens below {self._vocab_size}, its tokenizer gave {input_ids.max()}",
            )
        return Example(input_ids.astype(np.int32), labels.astype(np.int32))

    def _text(self, value: Mapping[str, Any]) -> _Draft:
        text = read_string(value["text"], "text", self._settings)
        ids = [*self._encoder.bos, *self._encoder.text(text), *self._encoder.eos]
        return _Draft(ids, [IGNORED] * len(self._encoder.bos) + ids[len(self._encoder.bos) :], None)

    def _prompt(self, value: Mapping[str, Any]) -> _Draft:
        for name in ("prompt", "completion"):
            if name not in value:
                raise RecordError(Reason.BAD_FORM, f"prompt and completion must come together, {name} is missing")
        prompt, completion = (read_string(value[name], name, self._settings) for name in ("prompt", "completion"))
        # Encoded apart, as they are when the model answers: no token reaches over the border.
        before = [*self._encoder.bos, *self._encoder.text(prompt)]
        answer = [*self._encoder.text(completion), *self._encoder.eos]
        return _Draft(before + answer, [IGNORED] * len(before) + answer, len(before))

    def _messages(self, value: Mapping[str, Any]) -> _Draft:
        turns = read_list(value["messages"], "messages", self._settings)
        if len(turns) > MAX_MESSAGES:
            raise RecordError(Reason.TOO_LARGE, f"a record may hold {MAX_MESSAGES} messages, found {len(turns)}")
        messages = [self._message(turn, f"messages[{i}]") for i, turn in enumerate(turns)]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()  # nothing is learned after the last answer
        if not messages:
            raise RecordError(Reason.NOTHING_TO_LEARN, "messages must hold an assistant turn, found none")
        ids, learned = self._encoder.chat(messages)
        labels = [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)]
        answer = max((t for t in range(len(ids)) if learned[t] and not (t and learned[t - 1])), default=0)
        return _Draft(ids, labels, answer)

    def _message(self, turn: object, where: str) -> dict[str, str]:
        if not isinstance(turn, dict):
            raise RecordError(Reason.BAD_TYPE, f"{where} must be an object, found {json_type(turn)}")
        if set(turn) != {"role", "content"}:
            found = ", ".join(map(str, turn))[:80]
            raise RecordError(Reason.BAD_FORM, f"{where} must have the keys role and content alone, found {found!r}")
        role = read_string(turn["role"], f"{where}.role", self._settings)
        if role not in ROLES:
            raise RecordError(Reason.BAD_FORM, f"{where}.role must be one of {', '.join(ROLES)}, found {role[:80]!r}")
        return {"role": role, "content": read_string(turn["content"], f"{where}.content", self._settings)}

    def _input_ids(self, value: Mapping[str, Any]) -> _Draft:
        if "input_ids" not in value:
            raise RecordError(Reason.BAD_FORM, "labels must come with input_ids, which is missing")
        ids = self._tokens(value, "input_ids")
        labels = self._tokens(value, "labels") if "labels" in value else ids.copy()
        if len(labels) != len(ids):
            raise RecordError(Reason.BAD_FORM, f"labels must be as many as input_ids, {len(ids)}, found {len(labels)}")
        return _Draft(ids, labels, None)

    def _tokens(self, value: Mapping[str, Any], name: str) -> list[int]:
        tokens = read_integers(value[name], name, self._settings)
        checked = [token for token in tokens if token != IGNORED] if name == "labels" else tokens
        if checked and (min(checked) < 0 or max(checked) >= self._vocab_size):
            wrong = next(token for token in checked if not 0 <= token < self._vocab_size)
            found = str(wrong) if wrong.bit_length() <= 64 else "more than 64 bits"
            raise RecordError(
                Reason.TOKEN_OUT_OF_RANGE, f"{name} must be in 0 to {self._vocab_size - 1}, found {found}"
            )
        return tokens

    def _fit(self, ids: list[int], labels: list[int], answer: int | None) -> tuple[list[int], list[int]]:
        """At most `max_tokens`: a prompt loses its beginning (bos stays), what has no prompt loses its end."""
        limit = self._settings.max_tokens
        if len(ids) <= limit:
            return ids, labels
        if self._settings.overlong == "dead_letter":
            raise RecordError(
                Reason.TOO_MANY_TOKENS, f"a record may hold {limit} tokens (max_tokens), found {len(ids)}"
            )
        if answer is None:
            return ids[:limit], labels[:limit]
        bos = ids[:1] if answer > 0 and ids[:1] == self._encoder.bos else []
        room = limit - len(bos)
        # An answer that alone is too long keeps its beginning, behind bos or else the prompt's last token.
        start = min(len(ids) - room, max(answer - 1 + len(bos), 0))
        return bos + ids[start : start + room], [IGNORED] * len(bos) + labels[start : start + room]


def _form(value: Mapping[str, Any]) -> str:
    """The one form that the keys name."""
    if "image" in value:
        raise RecordError(Reason.BAD_FORM, "image: this daemon was built for text records, image-text is not supported")
    for key in value:
        if key not in _KNOWN:
            name = str(key)[:80]
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)
            raise RecordError(Reason.BAD_FORM, f"{name!r}: unknown key, did you mean {near[0]}?")
    forms = list(dict.fromkeys(form for key, form in _FORM_OF.items() if key in value))
    if len(forms) != 1:
        known = ", ".join(dict.fromkeys(_FORM_OF.values()))
        raise RecordError(Reason.BAD_FORM, f"a record must be one of {known}, found {' and '.join(forms) or 'none'}")
    if not isinstance(value.get("sample_type", ""), str):
        raise RecordError(Reason.BAD_TYPE, f"sample_type must be a string, found {json_type(value['sample_type'])}")
    return forms[0]


class _Encoder:
    """A tokenizer that knows who wrote what: a chat template has control tokens, a record's text has none."""

    def __init__(self, tokenizer: Any) -> None:
        core = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(core, Tokenizer):
            raise ConfigError(f"the backbone needs a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}")
        self._tokenizer = tokenizer
        self._template = _template(tokenizer)
        self.bos = _bos(core, tokenizer.bos_token_id)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        # Without the post-processor a token's offsets are its whole extent, leading space included.
        description = json.loads(core.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        controls = self._controls(description["added_tokens"])
        for token in controls:
            token["special"] = True
        self._joint = Tokenizer.from_str(json.dumps(description))
        self._plain = Tokenizer.from_str(json.dumps(description))
        self._plain.encode_special_tokens = True
        self._ids = {token["content"]: token["id"] for token in controls}
        self._forged = frozenset(self._ids.values()) - {tokenizer.unk_token_id}
        self._names = list(self._ids)
        self._name = re.compile("|".join(re.escape(name) for name in self._names) or "(?!)")
        self._marker = re.compile("|".join(_marker(token) for token in controls) or "(?!)")

    def _controls(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The special tokens, and what else the chat template writes by itself; longest first, as they match."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            written = self._render([*turn, turn[0]], generate=True)
        except RecordError:
            written = ""
        chosen = [
            token
            for token in added
            if token["special"] or (token["content"] in written and re.search(r"[^\w\s]", token["content"]))
        ]
        return sorted(chosen, key=lambda token: -len(token["content"]))

    def text(self, text: str) -> list[int]:
        """Tokens of text as a record wrote it: names of control tokens are letters."""
        return self._letters(text)[0]

    def chat(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Tokens of the rendered messages, and whether each belongs to an assistant's turn; the last must be one.

        1. Names of control tokens in the contents are masked: those in the rendering are then the template's own.
        2. Turns are found in the rendering as the messages up to and including them less the messages before.
        3. The names are put back and everything is encoded, positions counted in the unmasked text.
        """
        masked, unmask = self._mask(messages)  # 1.
        whole = self._render(masked)
        spans = self._every_turn(masked, whole) or self._last_turn(masked, whole)  # 2.
        ids, starts = self._encode(whole, unmask)  # 3.
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            learned |= (starts >= len(unmask(whole[:start]))) & (starts < len(unmask(whole[:end])))
        return ids, learned.tolist()

    def _render(self, messages: list[dict[str, str]], *, generate: bool = False) -> str:
        if self._template is None:
            raise RecordError(Reason.BAD_FORM, "messages need a chat template and the backbone's tokenizer has none")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._template, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # a template is its author's program and raises what it likes
            raise RecordError(Reason.BAD_FORM, f"messages must fit the chat template: {str(error)[:200]}") from error

    def _every_turn(self, messages: list[dict[str, str]], whole: str) -> list[tuple[int, int]]:
        """Where each assistant turn stands in `whole`; empty when the template rewrites earlier turns."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before, upto = self._render(messages[:i], generate=True), self._render(messages[: i + 1])
            except RecordError:
                return []
            if not (upto.startswith(before) and whole.startswith(upto)) or (spans and len(before) < spans[-1][1]):
                return []
            spans.append((len(before), len(upto)))
        return spans

    def _last_turn(self, messages: list[dict[str, str]], whole: str) -> list[tuple[int, int]]:
        before = self._render(messages[:-1], generate=True)
        if not whole.startswith(before):
            raise RecordError(
                Reason.BAD_FORM,
                "messages cannot be learned: the chat template's generation prompt is no prefix of its assistant turn; "
                "use prompt and completion",
            )
        return [(len(before), len(whole))]

    def _mask(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], Callable[[str], str]]:
        contents = [message["content"] for message in messages]
        if not any(self._name.search(content) for content in contents):
            return messages, str
        mark = next((chr(c) for c in _MARKS if not any(chr(c) in content for content in contents)), None)
        if mark is None:
            raise RecordError(
                Reason.BAD_FORM, "messages name control tokens and use every private character: no mask left"
            )
        masked = [
            message
            | {"content": self._name.sub(lambda m: f"{mark}{self._names.index(m[0])}{mark}", message["content"])}
            for message in messages
        ]
        return masked, lambda text: re.sub(f"{mark}([0-9]+){mark}", lambda m: self._names[int(m[1])], text)

    def _encode(self, whole: str, unmask: Callable[[str], str]) -> tuple[list[int], NDArray[np.int64]]:
        """Token ids of a rendering and where each starts in the unmasked text."""
        if unmask is str:
            joint = self._joint.encode(whole, add_special_tokens=False)
            written = [control for _, control in self._pieces(whole) if control is not None]
            if [token for token in joint.ids if token in self._forged] == written:  # exactly what transformers gives
                return joint.ids, np.array([start for start, _ in joint.offsets])
        ids: list[int] = []
        starts: list[int] = []
        base = 0
        for piece, control in self._pieces(whole):
            text = unmask(piece)
            tokens, offsets = ([control], [0]) if control is not None else self._letters(text)
            ids += tokens
            starts += [base + start for start in offsets]
            base += len(text)
        return ids, np.array(starts)

    def _pieces(self, whole: str) -> Iterator[tuple[str, int | None]]:
        """The rendering cut at the template's control tokens: text, and the token's id where it is one."""
        end = 0
        for match in self._marker.finditer(whole):
            yield whole[end : match.start()], None
            name = self._name.search(match[0])
            assert name is not None
            yield match[0], self._ids[name[0]]
            end = match.end()
        yield whole[end:], None

    def _letters(self, text: str) -> tuple[list[int], list[int]]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        if not self._forged.isdisjoint(encoding.ids):
            name = next(name for name in self._names if self._ids[name] in encoding.ids)
            raise RecordError(Reason.BAD_FORM, f"text must not name {name}: this tokenizer cannot spell it in letters")
        return encoding.ids, [start for start, _ in encoding.offsets]


def _template(tokenizer: Any) -> str | None:
    try:
        template = str(tokenizer.get_chat_template())
    except ValueError:
        return None
    return f"{_FIXED_DATE}{template}" if "strftime_now" in template else template


def _bos(core: Tokenizer, bos: int | None) -> list[int]:
    """The bos token, when the tokenizer's own convention puts it before a text."""
    first = core.encode("a", add_special_tokens=True).ids[:1]
    return [bos] if bos is not None and first == [bos] else []


def _marker(token: dict[str, Any]) -> str:
    """Pattern of a control token in a rendering; some swallow the space beside them."""
    left, right = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return f"{left}{re.escape(token['content'])}{right}"
