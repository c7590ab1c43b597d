"""Encoding of text to token ids, with the assistant's turns marked.

Text cannot forge a turn. A string that names a control token, such as `<|im_end|>`, is encoded letter by letter where a
record contains it, and as the control token where the chat template writes it. The encoder keeps two private copies of
the tokenizer's core for this: `encode_special_tokens`, which makes the difference, is a flag of the core that any call
through transformers may change.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from streamlearn.errors import ConfigError, Reason, RecordError

Message = dict[str, Any]
"""`role`, and `content`: a string, or parts {"type": "image"} and {"type": "text", "text": ...}."""
_FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}"  # a replay must not depend on the date
_MARKS = range(0xE000, 0xF900)  # private use area: one of them masks the names of control tokens during rendering


class Encoder:
    """A tokenizer in which only the chat template can write control tokens; a record's text cannot."""

    def __init__(self, tokenizer: Any, template: str | None = None, *, in_parts: bool = False) -> None:
        """Build an encoder.

        Args:
            tokenizer: a fast tokenizer of transformers.
            template: a chat template that replaces the tokenizer's own.
            in_parts: whether the template expects every content as a list of parts.
        """
        core = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(core, Tokenizer):
            raise ConfigError(
                f"the backbone must have a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        self._template = _dated(template) if template is not None else _template(tokenizer)
        self._in_parts = in_parts
        self.bos = _bos(core, tokenizer.bos_token_id)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        # Without the post-processor a token's offsets cover the whole token, including its leading space.
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
        self.stop = frozenset([*self.eos, *self._turn_end()])

    def _controls(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The special tokens and other tokens that the chat template writes by itself; longest first, for matching."""
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
        """Encode a record's text; names of control tokens are encoded letter by letter."""
        [encoding] = self._plain.encode_batch_fast([text], add_special_tokens=False)  # without offsets
        return self._without_controls(encoding).ids

    def chat(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Encode messages; return the tokens and whether each belongs to an assistant turn. The last must be one.

        1. Mask the names of control tokens in the contents: those in the rendering are then the template's own.
        2. Find each turn in the rendering: the rendering of the messages up to it, minus that of the messages before.
        3. Restore the names and encode everything; positions refer to the unmasked text.
        """
        masked, unmask = self._mask(messages)  # 1.
        whole = self._render(masked)
        spans = self._every_turn(masked, whole) or self._last_turn(masked, whole)  # 2.
        ids, starts = self._encode(whole, unmask)  # 3.
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in _unmasked_spans(whole, spans, unmask):
            learned |= (starts >= start) & (starts < end)
        return ids, learned.tolist()

    def generation_prompt(self, messages: list[Message]) -> list[int]:
        """Encode a conversation up to the start of the assistant's next turn."""
        masked, unmask = self._mask(messages)
        return self._encode(self._render(masked, generate=True), unmask)[0]

    def to_text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without control tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _turn_end(self) -> list[int]:
        """The control token that the template writes after an answer, if any."""
        answer = "\N{PILCROW SIGN}"
        try:
            whole = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
        except RecordError:
            return []
        tail = whole.rpartition(answer)[2]
        return [control for _, control in self._pieces(tail) if control is not None][:1]

    def _render(self, messages: list[Message], *, generate: bool = False) -> str:
        if self._template is None:
            raise RecordError(Reason.BAD_FORM, "messages need a chat template, the backbone's tokenizer has none")
        if self._in_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._template, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # a template is a program and may raise any error
            raise RecordError(Reason.BAD_FORM, f"messages must fit the chat template: {str(error)[:200]}") from error

    def _every_turn(self, messages: list[Message], whole: str) -> list[tuple[int, int]]:
        """The span of each assistant turn in `whole`; empty when the template rewrites earlier turns."""
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

    def _last_turn(self, messages: list[Message], whole: str) -> list[tuple[int, int]]:
        """The span of the last turn only."""
        before = self._render(messages[:-1], generate=True)
        if not whole.startswith(before):
            raise RecordError(
                Reason.BAD_FORM,
                "messages cannot be learned: the chat template's generation prompt must be a prefix of its assistant "
                "turn, and is not; use prompt and completion",
            )
        return [(len(before), len(whole))]

    def _mask(self, messages: list[Message]) -> tuple[list[Message], Callable[[str], str]]:
        """The messages with the names of control tokens masked, and the function that restores them."""
        contents = [part["text"] for message in messages for part in _parts(message["content"]) if "text" in part]
        if not any(self._name.search(content) for content in contents):
            return messages, str
        mark = next((chr(c) for c in _MARKS if not any(chr(c) in content for content in contents)), None)
        if mark is None:
            raise RecordError(
                Reason.BAD_FORM,
                "messages contain names of control tokens and every private-use character: none is left to mask them",
            )

        def mask(text: str) -> str:
            return self._name.sub(lambda m: f"{mark}{self._names.index(m[0])}{mark}", text)

        masked = [{**message, "content": _mapped(message["content"], mask)} for message in messages]
        return masked, lambda text: re.sub(f"{mark}([0-9]+){mark}", lambda m: self._names[int(m[1])], text)

    def _encode(self, whole: str, unmask: Callable[[str], str]) -> tuple[list[int], NDArray[np.int64]]:
        """Token ids of a rendering, and where each starts in the unmasked text."""
        if unmask is str:
            joint = self._joint.encode(whole, add_special_tokens=False)
            written = [control for _, control in self._pieces(whole) if control is not None]
            if [token for token in joint.ids if token in self._forged] == written:  # exactly what transformers returns
                return joint.ids, np.array([start for start, _ in joint.offsets])
        ids: list[int] = []
        starts: list[int] = []
        base = 0
        for piece, control in self._pieces(whole):
            text = unmask(piece)
            if control is None:
                encoding = self._encode_literally(text)
                ids += encoding.ids
                starts += [base + start for start, _ in encoding.offsets]
            else:
                ids.append(control)
                starts.append(base)
            base += len(text)
        return ids, np.array(starts)

    def _pieces(self, whole: str) -> Iterator[tuple[str, int | None]]:
        """Split the rendering at the template's control tokens: each piece, with its id if it is a control token."""
        end = 0
        for match in self._marker.finditer(whole):
            yield whole[end : match.start()], None
            name = self._name.search(match[0])
            assert name is not None
            yield match[0], self._ids[name[0]]
            end = match.end()
        yield whole[end:], None

    def _encode_literally(self, text: str) -> Encoding:
        """The encoding of text in which no control token is recognized."""
        return self._without_controls(self._plain.encode(text, add_special_tokens=False))

    def _without_controls(self, encoding: Encoding) -> Encoding:
        if not self._forged.isdisjoint(encoding.ids):
            name = next(name for name in self._names if self._ids[name] in encoding.ids)
            raise RecordError(
                Reason.BAD_FORM,
                f"text must not contain {name}: this tokenizer can encode it only as the control token",
            )
        return encoding


def _unmasked_spans(
    whole: str, spans: Sequence[tuple[int, int]], unmask: Callable[[str], str]
) -> Iterator[tuple[int, int]]:
    """The same spans in the unmasked text; each part is unmasked once, because a record may hold 128 spans of 1 MB.

    A boundary lies where a rendering ended, so it never splits a mask.
    """
    done, length = 0, 0
    for span in spans:
        unmasked = []
        for boundary in span:
            length += len(unmask(whole[done:boundary]))
            done = boundary
            unmasked.append(length)
        yield unmasked[0], unmasked[1]


def _template(tokenizer: Any) -> str | None:
    try:
        template = str(tokenizer.get_chat_template())
    except ValueError:
        return None
    return _dated(template)


def _dated(template: str) -> str:
    return f"{_FIXED_DATE}{template}" if "strftime_now" in template else template


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _mapped(content: str | list[dict[str, str]], change: Callable[[str], str]) -> str | list[dict[str, str]]:
    """The content with `change` applied to every text."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if "text" in part else part for part in content]


def _bos(core: Tokenizer, bos: int | None) -> list[int]:
    """The bos token, if the tokenizer puts it before a text."""
    first = core.encode("a", add_special_tokens=True).ids[:1]
    return [bos] if bos is not None and first == [bos] else []


def _marker(token: dict[str, Any]) -> str:
    """Pattern of a control token in a rendering; some include the whitespace beside them."""
    left, right = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return f"{left}{re.escape(token['content'])}{right}"
