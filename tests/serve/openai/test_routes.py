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
        models = [each["id"] for each in daemon.client.get("/v1/models").json()["data"]]
        assert models == ["tickets", "builtin:nano", "tickets-regime-1", "tickets-regime-3"]
        answer = daemon.client.post("/v1/completions", json={**TEXT, "model": "tickets"})
        assert answer.json()["model"] == "tickets-regime-3"
        assert daemon.client.post("/v1/completions", json=TEXT).status_code == 404
    finally:
        daemon.stop()


def test_no_regime_is_listed_where_none_can_be_asked(daemon: Daemon, client: httpx2.Client) -> None:
    """Presets whose routing is the same for all regimes."""
    daemon.board.publish(replace(RUNNING, adaptation=replace(ADAPTATION, routes_by_regime=False)))
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["streamlearn", "builtin:nano"]
    assert client.post("/v1/completions", json={**TEXT, "model": "streamlearn-regime-1"}).status_code == 404


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


def test_headers_say_what_answered(client: httpx2.Client) -> None:
    """Of both kinds of answer, whole and streamed."""
    expected = {
        "x-streamlearn-model": "streamlearn-regime-3",
        "x-streamlearn-regime": "3",
        "x-streamlearn-score": "0.5",
    }
    for path, body in PATHS.items():
        for stream in (False, True):
            assert expected.items() <= client.post(path, json={**body, "stream": stream}).headers.items()


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
    assert events_of(client.post("/v1/completions", json={**TEXT, "stream": True}))[0]["model"] == name


def test_a_streamed_text_comes_in_pieces(client: httpx2.Client) -> None:
    """Events with one choice each; the last has the reason, none the usage."""
    events = events_of(client.post("/v1/completions", json={**TEXT, "stream": True}))
    assert {(event["id"], event["object"], event["model"], event["usage"]) for event in events} == {
        (events[0]["id"], "text_completion", "streamlearn-regime-3", None)
    }
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "after hello"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(events) - 1) + ["length"]
    assert all(event["route"] == ROUTE for event in events)


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


def test_defaults_are_those_of_openai(client: httpx2.Client, jobs: list[GenerateJob]) -> None:
    """Temperature 1, the whole vocabulary, a new seed each time; 16 tokens of a text, ours of an answer."""
    for _ in range(2):
        client.post("/v1/completions", json={"model": "streamlearn", "prompt": "a"})
        client.post("/v1/chat/completions", json={**CHAT, "temperature": None, "stop": None, "max_tokens": None})
    samplings = [job.sampling for job in jobs if job.sampling is not None]
    assert {(each.temperature, each.top_p) for each in samplings} == {(1.0, 1.0)}
    assert len({each.seed for each in samplings}) == 4
    assert [job.max_new_tokens for job in jobs] == [16, 32, 16, 32]
    assert {job.stop for job in jobs} == {()}


@pytest.mark.parametrize("seed", [-1, 2**53])
def test_any_integer_that_json_keeps_is_a_seed(client: httpx2.Client, jobs: list[GenerateJob], seed: int) -> None:
    """Negative ones too; larger ones are read as rounded numbers by many JSON readers, and refused."""
    assert client.post("/v1/completions", json={**TEXT, "seed": 2**53 + 1}).status_code == 400
    assert client.post("/v1/completions", json={**TEXT, "seed": seed}).status_code == 200
    assert jobs[0].sampling is not None
    assert jobs[0].sampling.seed == seed % 2**63


def test_temperature_zero_is_greedy(client: httpx2.Client, jobs: list[GenerateJob]) -> None:
    """Without a generator of random numbers."""
    client.post("/v1/completions", json={**TEXT, "temperature": 0, "stop": "x"})
    assert (jobs[0].sampling, jobs[0].stop) == (None, ("x",))


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


def test_a_regime_may_be_forgotten_before_its_job_runs(daemon: Daemon, client: httpx2.Client) -> None:
    """The loop has the last word, in a stream too."""
    daemon.loop.respond = lambda ticket: ticket.fail(UnknownRegimeError("regime 1 cannot answer, expected one of 3"))
    for stream in (False, True):
        answer = client.post("/v1/completions", json={**TEXT, "model": "streamlearn-regime-1", "stream": stream})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


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
        ("/v1/completions", {"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        ("/v1/completions", {"stop": "a" * 257}, "stop[0]", "at most 256 characters"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("/v1/chat/completions", {"max_completion_tokens": 33}, "max_completion_tokens", "found 33"),
        ("/v1/chat/completions", {"max_tokens": 33, "max_completion_tokens": 1}, "max_tokens", "found 33"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "required, found none"),
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


def test_an_unusable_prompt_names_its_field(daemon: Daemon, client: httpx2.Client) -> None:
    """As the decoder of records explains it."""
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


def test_a_daemon_that_is_not_ready_says_when_to_retry(daemon: Daemon, client: httpx2.Client) -> None:
    """503 with Retry-After; the models can be read all the same."""
    daemon.board.publish(Status(phase=Phase.RESTORING))
    for path, body in PATHS.items():
        answer = client.post(path, json={**body, "stream": True})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) > 0
    assert client.get("/v1/models").status_code == 200


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
