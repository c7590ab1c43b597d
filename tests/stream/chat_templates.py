"""Chat templates of the shapes that models have, with what each must teach. They are files in `templates`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from benchmarks.backbones.pretrain import train_tokenizer

_SENTENCES = ["the quick brown fox jumps over the lazy dog", "hello world, this is a test of a small tokenizer"] * 10
_NAME = re.compile(r"(<\|im_end\|>|</s>)")
_CONTROL = re.compile(
    r"<[|｜][^<>|｜']*[|｜]>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<extra_id_\d>|\[/?[A-Z]+_[A-Z]+\]"
)


@dataclass(frozen=True)
class Shape:
    """What is learned of an answer: `begin`, the answer after `change`, `end`."""

    begin: str = ""
    end: str = "<|im_end|>\n"
    change: Callable[[str], str] = str
    last_begin: str | None = None
    """In the last turn, if it differs; `last_end` and `last_change` alike."""
    last_change: Callable[[str], str] | None = None
    last_end: str | None = None
    system: bool = True
    """Whether a conversation may begin with a system message."""
    strict: bool = False
    """Whether user and assistant must alternate, the user first."""

    def turn(self, answer: str, *, is_last: bool) -> str:
        begin = self.last_begin if is_last and self.last_begin is not None else self.begin
        end = self.last_end if is_last and self.last_end is not None else self.end
        change = self.last_change if is_last and self.last_change is not None else self.change
        return begin + change(answer) + end


_THOUGHT = "<think>\n\n</think>\n\n"


def _without_newlines(text: str) -> str:
    return text.lstrip("\n")


def _upper(text: str) -> str:
    """Upper case, but for names of control tokens, which a template does not see."""
    return "".join(piece if number % 2 else piece.upper() for number, piece in enumerate(_NAME.split(text)))


SHAPES = {
    "always-opens": Shape(),
    "chatml": Shape(),
    "command-r": Shape(end="<|END_OF_TURN_TOKEN|>", change=str.strip, strict=True),
    "deepseek": Shape(end="</s>"),
    "falcon": Shape(begin=" ", end="</s>", change=str.strip),
    "gemma": Shape(end="<end_of_turn>\n", change=str.strip, system=False, strict=True),
    "glm": Shape(begin="\n", end="</s>"),
    "granite": Shape(end="<|end_of_text|>\n"),
    "harmony": Shape(begin="<|channel|>final<|message|>", end="<|end|>", last_end="<|return|>"),
    "llama2": Shape(begin=" ", end=" </s>", change=str.strip, strict=True),
    "llama3": Shape(end="<|eot_id|>", change=str.strip),
    "marks": Shape(),
    "mistral": Shape(end="</s>", system=False),
    "mistral-v3": Shape(begin=" ", end="</s>", change=str.strip, strict=True),
    "nemotron": Shape(end="</s>", change=str.strip),
    "no-end-of-turn": Shape(begin=" ", end="</s>"),
    "phi3": Shape(end="<|end|>\n"),
    "prompt-ends-in-space": Shape(end="</s>\n"),
    "prompt-ends-without-space": Shape(begin=" ", end="</s>\n"),
    "qwen2": Shape(),
    "qwen3": Shape(last_begin=_THOUGHT, last_change=_without_newlines),
    "reasoning-cut-from-history": Shape(last_begin=_THOUGHT, change=_without_newlines),
    "upper": Shape(change=_upper),
    "vicuna": Shape(begin=" ", end="</s>", change=str.strip),
    "zephyr": Shape(end="</s>\n"),
}


def source(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the template and its control tokens."""
    return with_template(source(name))


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(_SENTENCES, 400)
    names = dict.fromkeys(["<s>", "</s>", *_CONTROL.findall(template)])
    if "'<|' +" in template:
        names |= dict.fromkeys(["<|user|>", "<|assistant|>", "<|system|>"])
    controls = [AddedToken(name, normalized=False, special=True) for name in names]
    tokenizer.add_special_tokens({"additional_special_tokens": controls})
    eos = "<|im_end|>" if "im_end" in template else "</s>"
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": eos})
    tokenizer.chat_template = template
    return tokenizer
