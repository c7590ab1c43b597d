"""Routing here is the daemon's: the same regimes with the same scores."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from streamlearn.gateway.publication import Prompt, PublishedFolder, Router, decoder_of
from streamlearn.http.responses import ApiError
from streamlearn.jobs.queue import PromptInput, RouteJob
from streamlearn.jobs.runner import route
from streamlearn.learner.evaluate import run_to_end
from streamlearn.publish.publication import load_tokenizer
from streamlearn.settings import Settings, ShiftSettings
from streamlearn.shift.monitor import Monitor
from tests.daemon.test_daemon import daemon_of, opened
from tests.doubles import tiny_backbone
from tests.gateway.sample_publication import NANO, publish_sample, sample_records

from .kit import UNKNOWN_PROMPTS, prompts_of_each_task

PER_TASK = 24


def published_router(folder: Path, **options: Any) -> Router:
    publish_sample(folder, **options)
    return PublishedFolder(folder).load().router


def learned(folder: Path) -> Settings:
    """A daemon with the bundled tokenizer and a tiny model, on the first records of each task."""
    tokenizer = load_tokenizer(NANO)
    tokenizer.save_pretrained(tiny_backbone(folder / "backbone", vocab_size=len(tokenizer)))
    tasks: dict[str, list[bytes]] = {}
    for record in sample_records():
        tasks.setdefault(record["meta"]["task"], []).append(orjson.dumps(record) + b"\n")
    (folder / "stream.jsonl").write_bytes(b"".join(line for own in tasks.values() for line in own[:PER_TASK]))
    return Settings.model_validate(
        {
            "state": folder / "state",
            "source": {"jsonl": {"path": folder / "stream.jsonl"}},
            "stream": {"max_tokens": 2048, "batch_tokens": 4096},
            "backbone": {"model": str(folder / "backbone"), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "holdout": {"every_records": 0},
        }
    )


def test_a_gateway_routes_as_the_daemon_does(tmp_path: Path) -> None:
    """All prompts of the sample, as text and as conversations, and others: equal regimes, equal scores.

    Some seconds: a daemon learns, and routes as of what it has trained on.
    """
    prompts: list[Prompt] = [*(record["prompt"] for record in sample_records()), *UNKNOWN_PROMPTS]
    chats: list[Prompt] = [({"role": "user", "content": each},) for each in prompts[::4]]
    with opened(learned(tmp_path)) as components:
        daemon_of(components).run()
        adaptation, settings = components.adaptation, components.settings
        inputs = [*(PromptInput(str(each), None) for each in prompts), *(PromptInput(None, each) for each in chats)]  # type: ignore[arg-type]
        result = run_to_end(route(RouteJob((*inputs,)), components.learner, components.decoder, adaptation.route))
        publish_sample(
            tmp_path / "published",
            state=adaptation.monitor.state(adaptation.inputs.state),
            seed=settings.seed,
            max_known_rejected=settings.serve.max_known_rejected,
        )
    router = PublishedFolder(tmp_path / "published").load().router
    known = {each.regime for each in result.routes if each.known}
    assert len(known) > 1
    assert not all(each.known for each in result.routes)
    for theirs, prompt in zip(result.routes, [*prompts, *chats], strict=True):
        ours = router.route(prompt)
        assert ours.score == theirs.score
        assert (ours.regime.number if ours.regime else None) == (theirs.regime if theirs.known else None)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be  brief\n"}, {"role": "user", "content": " <|im_end|> <|im_start|>system"}],
        [
            {"role": "user", "content": "é\u0301 \U0001f600"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "\t"},
        ],
    ],
)
def test_a_conversation_has_the_daemons_tokens(published: Path, messages: list[dict[str, str]]) -> None:
    """The published tokenizer renders and encodes as the backbone's own, found by its model's type, does."""
    router = PublishedFolder(published).load().router
    own = decoder_of(AutoTokenizer.from_pretrained(NANO, local_files_only=True))
    assert router._encode(tuple(messages)).tolist() == own.prompt(messages).ids


def test_token_ids_are_routed_like_the_text_that_they_encode(published: Path) -> None:
    router = PublishedFolder(published).load().router
    for prompt in (*prompts_of_each_task(), *UNKNOWN_PROMPTS):
        assert router.route(tuple(router._encode(prompt).tolist())) == router.route(prompt)


def test_each_task_has_its_regime_and_other_prompts_have_none(published: Path) -> None:
    router = PublishedFolder(published).load().router
    regimes = [router.route(each).regime for each in (*prompts_of_each_task(), *UNKNOWN_PROMPTS)]
    assert [each.number if each else None for each in regimes] == [1, 2, 3, None, None, None]


def test_before_the_first_record_nothing_is_known(tmp_path: Path) -> None:
    """An empty publication sends everything to the backbone."""
    router = published_router(tmp_path, state=Monitor(ShiftSettings(), 100, seed=0).state())
    assert router.route("anything") == (None, 0.0)


@pytest.mark.parametrize("prompt", ["", ({"role": "nobody", "content": "x"},)])
def test_a_prompt_that_cannot_be_encoded_is_refused(published: Path, prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        PublishedFolder(published).load().router.route(prompt)
    assert (caught.value.status, caught.value.code) == (400, "unusable_prompt")
