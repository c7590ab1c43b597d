"""OpenAI's paths, with its own client and as raw requests, over a loop without a model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import orjson
import pytest

from streamlearn.errors import Reason, RecordError
from streamlearn.jobs.queue import GenerateJob, Sampling, Ticket
from streamlearn.status import Phase, Route, Status, UnknownRegimeError
from tests.serve.doubles import ADAPTATION, KNOWN, RUNNING, SETTINGS, TOKEN, UNKNOWN, Daemon, finish

TEXT: dict[str, Any] = {"model": "streamlearn", "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "streamlearn", "messages": [{"role": "user", "content": "hi"}]}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
ROUTE = {"regime": 3, "score": 0.5, "known": True, "answered_by": "regime"}


@pytest.fixture
def official(daemon: Daemon) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without a token and without retries."""
    url = f"http://127.0.0.1:{daemon.server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=5.0) as client:
        yield client


@pytest.fixture
def jobs(daemon: Daemon) -> list[GenerateJob]:
    """The jobs that reach the loop."""
    seen: list[GenerateJob] = []

    def respond(ticket: Ticket) -> None:
        assert isinstance(ticket.job, GenerateJob)
        seen.append(ticket.job)
        finish(ticket)

    daemon.loop.respond = respond
    return seen


def events_of(answer: httpx2.Response) -> list[Any]:
    """The objects of a complete stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [orjson.loads(event.removeprefix("data: ")) for event in events]


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """The error of a response in OpenAI's form."""
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    detail: dict[str, Any] = body["error"]
    return detail


def test_the_models_are_the_automatic_one_the_backbone_and_the_regimes(official: openai.OpenAI) -> None:
    """In this order, since the daemon started."""
    models = list(official.models.list())
    names = ["streamlearn", "builtin:nano", "streamlearn-regime-1", "streamlearn-regime-3"]
    assert [model.id for model in models] == names
    assert {(model.object, model.created, model.owned_by) for model in models} == {("model", 1_000_000, "streamlearn")}


def test_the_models_have_the_name_of_the_publication() -> None:
    """So that a daemon and a fleet answer to the same names."""
    daemon = Daemon(model_name="tickets")
    try:
        models = [model["id"] for model in daemon.client.get("/v1/models").json()["data"]]
        assert models == ["tickets", "builtin:nano", "tickets-regime-1", "tickets-regime-3"]
        answer = daemon.client.post("/v1/completions", json={**TEXT, "model": "tickets"})
        assert answer.json()["model"] == "tickets-regime-3"
        assert daemon.client.post("/v1/completions", json=TEXT).status_code == 404
        daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, routes_by_regime=False)))
        models = [model["id"] for model in daemon.client.get("/v1/models").json()["data"]]
        assert models == ["tickets", "builtin:nano"], "presets whose routing is the same for all regimes list none"
    finally:
        daemon.stop()


def test_a_text_is_continued(official: openai.OpenAI) -> None:
    """In OpenAI's form, with what answered."""
    answer = official.completions.create(**TEXT)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.created, answer.model) == ("text_completion", 1_000_100, "streamlearn-regime-3")
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "after hello", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)
    assert answer.system_fingerprint == "step-42"
    assert (answer.model_extra or {})["route"] == ROUTE


def test_a_conversation_is_answered(official: openai.OpenAI) -> None:
    """In OpenAI's form, with what answered."""
    answer = official.chat.completions.create(**CHAT)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "streamlearn-regime-3")
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "after ({'role': 'user', 'content': 'hi'},)"
    assert (choice.finish_reason, (answer.model_extra or {})["route"]) == ("length", ROUTE)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == SETTINGS.max_new_tokens


@pytest.mark.parametrize(
    ("route", "name"),
    [
        (UNKNOWN, "builtin:nano"),
        (replace(UNKNOWN, answered_by="mean"), "streamlearn-mean"),
        (replace(KNOWN, answered_by="adapter"), "streamlearn-adapter"),
        (Route(None, 0.0, known=False, answered_by="backbone"), "builtin:nano"),
    ],
)
def test_an_answer_names_what_computed_it(daemon: Daemon, client: httpx2.Client, route: Route, name: str) -> None:
    """Whatever was asked for."""
    daemon.loop.respond = lambda ticket: finish(ticket, route)
    answer = client.post("/v1/completions", json=TEXT)
    assert answer.json()["model"] == answer.headers["x-streamlearn-model"] == name
    assert answer.headers["x-streamlearn-score"] == repr(route.score)
    stream = client.post("/v1/completions", json={**TEXT, "stream": True})
    assert events_of(stream)[0]["model"] == stream.headers["x-streamlearn-model"] == name


def test_a_streamed_answer_begins_with_the_role(client: httpx2.Client) -> None:
    """Then come the pieces of its content, then the reason."""
    first, *pieces, last = events_of(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(list(piece["choices"][0]["delta"]) == ["content"] for piece in pieces)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_the_usage_is_streamed_if_it_is_asked_for(official: openai.OpenAI, client: httpx2.Client) -> None:
    """In an event of its own without a choice, after the others."""
    for path, body in PATHS.items():
        asked = {**body, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        *others, last = events_of(client.post(path, json=asked))
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)
        assert all(len(other["choices"]) == 1 and other["usage"] is None for other in others)
        assert {(other["id"], other["model"]) for other in others} == {(last["id"], "streamlearn-regime-3")}
        assert [other["choices"][0]["finish_reason"] for other in others] == [None] * (len(others) - 1) + ["length"]
    stream = official.chat.completions.create(
        **{**CHAT, "max_completion_tokens": 3}, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "after ({'role': 'user', 'content': 'hi'},)"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8


def test_a_job_says_how_to_decode(client: httpx2.Client, jobs: list[GenerateJob]) -> None:
    """Every field arrives."""
    body = {**TEXT, "temperature": 0.5, "top_p": 0.25, "seed": 7, "stop": ["a", "b"], "n": 1, "user": "me"}
    assert client.post("/v1/completions", json=body).status_code == 200
    expected = GenerateJob(
        "hello", None, max_new_tokens=3, sampling=Sampling(0.5, 0.25, 7), stop=("a", "b"), requested="routed"
    )
    assert jobs == [expected]
    client.post("/v1/completions", json={**TEXT, "temperature": 0, "stop": "x", "seed": -1})
    assert (jobs[1].sampling, jobs[1].stop) == (None, ("x",))  # greedy
    client.post("/v1/completions", json={**TEXT, "seed": -1})
    assert jobs[2].sampling is not None
    assert jobs[2].sampling.seed == 2**63 - 1


def test_defaults_are_those_of_openai(client: httpx2.Client, jobs: list[GenerateJob]) -> None:
    """Temperature 1, the whole vocabulary, a new seed each time; 16 tokens of a text, ours of an answer."""
    for _ in range(2):
        client.post("/v1/completions", json={"model": "streamlearn", "prompt": "a"})
        client.post("/v1/chat/completions", json={**CHAT, "temperature": None, "stop": None, "max_tokens": None})
    samplings = [job.sampling for job in jobs if job.sampling is not None]
    assert {(sampling.temperature, sampling.top_p) for sampling in samplings} == {(1.0, 1.0)}
    assert len({sampling.seed for sampling in samplings}) == 4
    assert [job.max_new_tokens for job in jobs] == [16, 32, 16, 32]
    assert {job.stop for job in jobs} == {()}


@pytest.mark.parametrize(
    ("model", "requested"), [("streamlearn", "routed"), ("builtin:nano", "backbone"), ("streamlearn-regime-1", 1)]
)
def test_the_model_chooses_what_answers(
    client: httpx2.Client, jobs: list[GenerateJob], model: str, requested: object
) -> None:
    """Routing, the untouched backbone, or a regime."""
    for path, body in PATHS.items():
        assert client.post(path, json={**body, "model": model}).status_code == 200
    assert [job.requested for job in jobs] == [requested] * 2


@pytest.mark.parametrize("model", ["gpt-5", "streamlearn-regime-2"])
def test_an_unknown_model_is_not_found(official: openai.OpenAI, client: httpx2.Client, model: str) -> None:
    """With OpenAI's code, and before anything is streamed."""
    with pytest.raises(openai.NotFoundError) as caught:
        official.chat.completions.create(**{**CHAT, "model": model})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    answer = client.post("/v1/completions", json={**TEXT, "model": model, "stream": True})
    assert (answer.status_code, error_of(answer)["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("/v1/completions", {"n": 2}, "n", "found 2"),
        ("/v1/completions", {"best_of": 2}, "best_of", "best_of: not supported by this server; leave it out"),
        ("/v1/completions", {"logprobs": 0}, "logprobs", "not supported"),
        ("/v1/completions", {"promt": "a"}, "promt", "unknown field; did you mean prompt?"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt", "expected one text: token ids"),
        ("/v1/completions", {"max_tokens": 33}, "max_tokens", "expected at most 32, found 33; request fewer"),
        ("/v1/completions", {"max_completion_tokens": 1}, "max_completion_tokens", "did you mean max_tokens?"),
        ("/v1/completions", {"temperature": "0.5"}, "temperature", "expected a number"),
        ("/v1/completions", {"seed": 2**53 + 1}, "seed", "expected at most"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("/v1/chat/completions", {"max_tokens": 33, "max_completion_tokens": 1}, "max_tokens", "found 33"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].image_url.url",
            "nothing is downloaded",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    daemon: Daemon, client: httpx2.Client, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    """With status 400 in OpenAI's form, also for a stream; nothing is queued."""
    daemon.loop.respond = lambda _: pytest.fail("a job was queued")
    for stream in ({}, {"stream": True}):
        answer = client.post(path, json={**PATHS[path], **stream, **change})
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert message in error["message"]
        assert error["message"].count(";") <= 1, "one fault is reported once"


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": None, "logit_bias": None, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me"},
        {"logprobs": False, "logit_bias": {}, "metadata": {"a": "b"}, "store": True, "stream_options": None},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(client: httpx2.Client, change: dict[str, Any]) -> None:
    """Many clients send every field."""
    for path, body in PATHS.items():
        assert client.post(path, json={**body, **change}).status_code == 200
    more = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert client.post("/v1/chat/completions", json={**CHAT, **more}).status_code == 200


def test_a_job_that_fails_before_its_text_has_a_status(daemon: Daemon, client: httpx2.Client) -> None:
    """In a stream too. An unusable prompt names its field; a regime may be forgotten before its job runs."""
    daemon.board.publish(Status(phase=Phase.RESTORING))
    for path, body in PATHS.items():
        answer = client.post(path, json={**body, "stream": True})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) > 0
    daemon.board.publish(RUNNING)
    daemon.loop.respond = lambda ticket: ticket.fail(UnknownRegimeError("regime 1 cannot answer, expected one of 3"))
    answer = client.post("/v1/completions", json={**TEXT, "model": "streamlearn-regime-1", "stream": True})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    daemon.loop.respond = lambda ticket: ticket.fail(
        RecordError(Reason.BAD_FORM, "image: this backbone reads only text")
    )
    for (path, body), field in zip(PATHS.items(), ("prompt", "messages"), strict=True):
        for stream in (False, True):
            answer = client.post(path, json={**body, "stream": stream})
            assert answer.status_code == 400
            error = error_of(answer)
            assert (error["message"], error["param"]) == ("image: this backbone reads only text", field)
            assert error["code"] == "bad_form"


def test_the_token_is_the_api_key() -> None:
    """Where it is required; else any key will do."""
    daemon = Daemon(SETTINGS.model_copy(update={"require_token": True}))
    url = f"http://127.0.0.1:{daemon.server.port}/v1"
    try:
        with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            assert client.completions.create(**TEXT).choices[0].text == "after hello"
            assert len(list(client.chat.completions.create(**CHAT, stream=True))) > 2
        with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "no_token"
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(**TEXT)
    finally:
        daemon.stop()
