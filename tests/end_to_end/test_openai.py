"""OpenAI's own client and a running daemon."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import orjson
import pytest

from tests.doubles import tiny_backbone
from tests.end_to_end.process import ForkedDaemon
from tests.end_to_end.test_questions import endpoint, stream

PROMPT = "say 3"
MESSAGES: list[Any] = [{"role": "user", "content": "say 3"}]
TOKENS = 24


@dataclass
class Running:
    """A daemon that has learned 40 records, and its clients."""

    backbone: str
    plain: httpx2.Client
    official: openai.OpenAI

    def text(self, **options: Any) -> str:
        """A continued prompt."""
        asked = {"model": "streamlearn", "prompt": PROMPT, "max_tokens": TOKENS, **options}
        return str(self.official.completions.create(**asked).choices[0].text)

    def pieces(self, **options: Any) -> list[str]:
        """The pieces of the same, streamed."""
        asked = {"model": "streamlearn", "prompt": PROMPT, "max_tokens": TOKENS, **options}
        return [event.choices[0].text for event in self.official.completions.create(**asked, stream=True)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("openai")
    backbone = tiny_backbone(folder / "backbone")
    (folder / "stream.jsonl").write_bytes(stream(40))
    process = ForkedDaemon(
        folder / "daemon",
        {
            "source": {"jsonl": {"path": str(folder / "stream.jsonl"), "follow": True}},
            "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 4},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "learner": {"lr": 1e-2},
            "shift": {"lookahead_records": 0},
            "holdout": {"every_records": 0},
            "serve": {"port": 0, "require_token": True},
            "log": {"style": "json"},
        },
    )
    process.start()
    try:
        with endpoint(process) as plain:
            token = plain.headers["authorization"].removeprefix("Bearer ")
            with openai.OpenAI(base_url=f"{plain.base_url}/v1/", api_key=token, max_retries=0) as official:
                yield Running(str(backbone), plain, official)
    finally:
        process.end()


def test_the_models_are_listed(running: Running) -> None:
    """Each can be asked, and the answer names it."""
    names = [model.id for model in running.official.models.list()]
    assert names == ["streamlearn", running.backbone, "streamlearn-regime-1"]
    for name in names[1:]:
        assert running.official.completions.create(model=name, prompt=PROMPT, max_tokens=1).model == name
    assert running.official.completions.create(model=names[0], prompt=PROMPT, max_tokens=1).model in names[1:]


def test_the_regime_has_learned_what_the_backbone_has_not(running: Running) -> None:
    """Greedily; routing finds it."""
    learned = running.text(model="streamlearn-regime-1", temperature=0)
    assert learned != running.text(model=running.backbone, temperature=0)
    assert running.text(temperature=0) == learned


def test_a_seed_repeats_a_text(running: Running) -> None:
    """Bit for bit on the same weights; another seed, or none, gives another."""
    model = "streamlearn-regime-1"
    first = running.text(model=model, seed=1, temperature=1.5)
    assert running.text(model=model, seed=1, temperature=1.5) == first
    others = {running.text(model=model, temperature=1.5, **seed) for seed in ({"seed": 2}, {"seed": 3}, {}, {})}
    assert len(others | {first}) > 3
    assert running.text(model=model, temperature=1.5, top_p=0.0) == running.text(model=model, temperature=0)


DECODINGS: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1, "temperature": 2}]
"""At a high temperature tokens end in the middle of characters."""


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_a_stream_joins_to_the_whole_text_and_a_stop_string_ends_it(running: Running, decoding: dict[str, Any]) -> None:
    """In several pieces; wherever the stop string lies in the tokens, a stream never shows its beginning."""
    asked = {"model": running.backbone, **decoding}  # what was learned here is a short answer
    pieces = running.pieces(**asked, max_tokens=96)
    assert "".join(pieces) == running.text(**asked, max_tokens=96)
    assert len([piece for piece in pieces if piece]) > 1
    whole = running.text(**asked)
    for start, end in ((2, 3), (3, 7), (1, len(whole))):
        stop = ["never there", whole[start:end]]
        cut = whole[: whole.index(whole[start:end])]
        answer = running.official.completions.create(prompt=PROMPT, max_tokens=TOKENS, stop=stop, **asked)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        assert "".join(running.pieces(stop=stop, **asked)) == cut


def test_a_conversation_is_answered_whole_and_streamed(running: Running) -> None:
    """With its usage."""
    asked: dict[str, Any] = {
        "model": "streamlearn",
        "messages": MESSAGES,
        "seed": 3,
        "max_completion_tokens": 8,
    }
    whole = running.official.chat.completions.create(**asked)
    chunks = list(
        running.official.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 5  # with the control tokens of the template
    assert 0 < whole.usage.completion_tokens <= 8
    assert whole.system_fingerprint == f"step-{running.plain.get('/v1/status').json()['step']}"


def test_control_tokens_cannot_be_forged(running: Running) -> None:
    """The name of one is text: it takes several tokens, and changes the answer's prompt, not its roles."""

    def prompt_tokens(content: str) -> int:
        answer = running.official.chat.completions.create(
            model="streamlearn", messages=[{"role": "user", "content": content}], max_tokens=1
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens("a<|im_end|>") > prompt_tokens("a") + 3


def test_an_image_needs_a_backbone_that_reads_it(running: Running) -> None:
    """The error says so."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    messages: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError, match="this backbone reads only text") as caught:
        running.official.chat.completions.create(model="streamlearn", messages=messages)
    assert caught.value.param == "messages"


def test_an_unknown_model_and_a_wrong_token_are_openais_errors(running: Running) -> None:
    """As its client raises them."""
    with pytest.raises(openai.NotFoundError):
        running.text(model="streamlearn-regime-9")
    with pytest.raises(openai.AuthenticationError):
        running.official.with_options(api_key="wrong").models.list()


def test_a_stream_that_is_left_frees_the_daemon(running: Running) -> None:
    """The next request need not wait for its end."""
    body = {"model": running.backbone, "prompt": PROMPT, "stream": True, "max_tokens": 256}
    for _ in range(12):  # more than the queue holds
        with running.plain.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            line = next(answer.iter_lines())
            assert orjson.loads(line.removeprefix("data: "))["object"] == "text_completion"
    assert running.text(model="streamlearn-regime-1", max_tokens=1, temperature=0)
