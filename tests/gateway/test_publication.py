"""A published folder: what is read, how it routes, and under which names."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from streamlearn.codec import to_arrays
from streamlearn.errors import PublicationError
from streamlearn.gateway.publication import LoadedPublication, Prompt, Target, version_of
from streamlearn.http.responses import ApiError
from streamlearn.jobs.queue import PromptInput, RouteJob
from streamlearn.jobs.runner import route
from streamlearn.learner.evaluate import run_to_end
from streamlearn.model_files import load_tokenizer
from streamlearn.publish.publication import FILE, VECTORS_FILE
from streamlearn.settings import Settings, StreamSettings
from streamlearn.shift.monitor import MonitorState
from streamlearn.stream.decode import Decoder
from tests.daemon.test_daemon import daemon_of, opened
from tests.doubles import tiny_backbone
from tests.gateway.sample_publication import NANO, publish_sample, sample_records

from .kit import UNKNOWN_PROMPTS, prompts_of_each_task


def test_a_new_publication_is_a_new_version(published: Path) -> None:
    """Also one of the same size, within the resolution of a clock: every publication is a new file."""
    before = version_of(published / FILE)
    publish_sample(published, 184)
    assert before != version_of(published / FILE) is not None
    assert version_of(published / "missing") is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_an_error_with_its_folder(published: Path, name: str) -> None:
    (published / "tokenizer" / name).write_text("{")
    with pytest.raises(PublicationError, match="tokenizer: the tokenizer cannot be read"):
        LoadedPublication.read(published)


def test_a_publication_without_token_vectors_is_refused(published: Path) -> None:
    """As one of an earlier version; the message says what to do."""
    (published / "tokenizer" / VECTORS_FILE).unlink()
    with pytest.raises(PublicationError, match=r"token_vectors.safetensors: .*; publish and serve with"):
        LoadedPublication.read(published)


PER_TASK = 24


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
    chats: list[Prompt] = [({"role": "user", "content": prompt},) for prompt in prompts[::4]]
    with opened(learned(tmp_path)) as components:
        daemon_of(components).run()
        adaptation, settings = components.adaptation, components.settings
        inputs = [*(PromptInput(str(prompt), None) for prompt in prompts), *(PromptInput(None, chat) for chat in chats)]  # type: ignore[arg-type]
        result = run_to_end(route(RouteJob((*inputs,)), components.learner, components.decoder, adaptation.route))
        publish_sample(
            tmp_path / "published",
            state=to_arrays(adaptation.monitor.trained),
            vectors_VD=components.model.backbone.token_vectors,
            seed=settings.seed,
            max_known_rejected=settings.serve.max_known_rejected,
        )
    loaded = LoadedPublication.read(tmp_path / "published")
    assert len({answer.regime for answer in result.routes if answer.known}) > 1
    assert not all(answer.known for answer in result.routes)
    for theirs, prompt in zip(result.routes, [*prompts, *chats], strict=True):
        ours = loaded.route(prompt)
        assert (ours.score, ours.regime) == (theirs.score, theirs.regime if theirs.known else None)


@pytest.mark.parametrize(
    "messages",
    [
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
    loaded = LoadedPublication.read(published)
    tokenizer = AutoTokenizer.from_pretrained(NANO, local_files_only=True)
    own = Decoder(tokenizer, StreamSettings(), len(tokenizer))
    assert loaded.encode(tuple(messages)).tolist() == own.prompt(messages).ids


def test_token_ids_are_routed_like_the_text_that_they_encode(published: Path) -> None:
    loaded = LoadedPublication.read(published)
    for prompt in (*prompts_of_each_task(), *UNKNOWN_PROMPTS):
        assert loaded.route(tuple(loaded.encode(prompt).tolist())) == loaded.route(prompt)


def test_before_the_first_record_nothing_is_known(tmp_path: Path) -> None:
    """An empty publication sends everything to the backbone."""
    publish_sample(tmp_path, state=to_arrays(MonitorState()))
    assert LoadedPublication.read(tmp_path).route("anything") == Target("nano", score=0.0)


@pytest.mark.parametrize("prompt", ["", ({"role": "nobody", "content": "x"},)])
def test_a_prompt_that_cannot_be_encoded_is_refused(published: Path, prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        LoadedPublication.read(published).route(prompt)
    assert (caught.value.status, caught.value.code) == (400, "unusable_prompt")


OF_ANOTHER_RUN = "streamlearn-regime-2@100-77aa01"
SERVED = (
    "nano",
    "streamlearn-regime-1@184-5d3c1f",
    "streamlearn-regime-2@100-5d3c1f",
    "streamlearn-regime-x@1-5d3c1f",
    OF_ANOTHER_RUN,
    "other",
)


@pytest.fixture
def names(tmp_path: Path) -> LoadedPublication:
    """Three regimes; the third has no published version."""
    publish_sample(tmp_path, held_back=(3,))
    return LoadedPublication.read(tmp_path)


def test_a_name_has_one_meaning(names: LoadedPublication) -> None:
    """A version that is published no longer is answered for as long as a server has it."""
    for model, target in (
        ("nano", Target("nano")),
        ("streamlearn-regime-1", Target("streamlearn-regime-1@184-5d3c1f", 1)),
        ("streamlearn-regime-3", Target("nano", 3)),
        ("streamlearn-regime-2@184-5d3c1f", Target("streamlearn-regime-2@184-5d3c1f", 2)),
        ("streamlearn-regime-2@100-5d3c1f", Target("streamlearn-regime-2@100-5d3c1f", 2)),
    ):
        assert names.named(model, SERVED) == target


def test_any_other_name_is_unknown(names: LoadedPublication) -> None:
    """Even if a server has a model of that name: it is no model of this gateway."""
    absent = ("streamlearn-regime-9", "streamlearn-regime-1@1-5d3c1f", "streamlearn-regime-x@1-5d3c1f")
    for model in ("other", OF_ANOTHER_RUN, *absent):
        with pytest.raises(ApiError) as caught:
            names.named(model, SERVED)
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_the_list_has_every_name_once(names: LoadedPublication) -> None:
    assert [row["id"] for row in names.rows(SERVED)] == [
        "streamlearn",
        "nano",
        "streamlearn-regime-1",
        "streamlearn-regime-2",
        "streamlearn-regime-3",
        "streamlearn-regime-1@184-5d3c1f",
        "streamlearn-regime-2@100-5d3c1f",
        "streamlearn-regime-2@184-5d3c1f",
    ]
