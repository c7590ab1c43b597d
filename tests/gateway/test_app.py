"""The gateway from outside: what it answers, under which names, and with which errors."""

import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamlearn.gateway.app import MAX_PROMPTS, completion_prompts, messages_prompt
from streamlearn.gateway.publication import LoadedPublication, Prompt, Target
from streamlearn.http.responses import ApiError
from tests.gateway.stub_upstream import StubUpstream

from .kit import TEXT, UNKNOWN_PROMPTS, ask, gateway, is_ready, metric, prompts_of_each_task, wait_until

TOKEN = "0123456789abcdef" * 2


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_request_is_answered_by_its_regimes_version(client: httpx2.Client) -> None:
    """The body and the headers name it."""
    for number, prompt in enumerate(prompts_of_each_task(), start=1):
        answer = ask(client, prompt)
        version = f"streamlearn-regime-{number}@184-5d3c1f"
        assert (answer.status_code, answer.json()["model"]) == (200, version)
        assert answer.headers["x-streamlearn-model"] == version
        assert answer.headers["x-streamlearn-regime"] == str(number)
        assert float(answer.headers["x-streamlearn-score"]) >= 0.01
        assert answer.headers["x-streamlearn-publication"] == "1"


def test_what_no_regime_explains_is_answered_by_the_backbone(client: httpx2.Client) -> None:
    for prompt in UNKNOWN_PROMPTS:
        answer = ask(client, prompt)
        assert (answer.json()["model"], answer.headers["x-streamlearn-model"]) == ("nano", "nano")
        assert float(answer.headers["x-streamlearn-score"]) < 0.01
        assert "x-streamlearn-regime" not in answer.headers


def test_a_named_model_is_not_routed(client: httpx2.Client) -> None:
    """Whatever the prompt is."""
    answer = ask(client, prompts_of_each_task()[0], model="streamlearn-regime-2")
    assert answer.json()["model"] == answer.headers["x-streamlearn-model"] == "streamlearn-regime-2@184-5d3c1f"
    assert "x-streamlearn-score" not in answer.headers


def test_a_decision_alone_is_the_one_that_a_completion_gets(
    client: httpx2.Client, upstreams: list[StubUpstream]
) -> None:
    """With the daemon's fields; no server is asked."""
    prompts = [*prompts_of_each_task(), UNKNOWN_PROMPTS[0]]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    rows.append({"messages": [{"role": "user", "content": "a"}]})
    routes = client.post("/v1/route", json={"prompts": rows}).json()["routes"]
    assert all(not upstream.answered for upstream in upstreams)
    for prompt, route in zip(prompts, routes, strict=False):
        answer = ask(client, prompt)
        assert route["model"] == answer.json()["model"]
        assert repr(route["score"]) == answer.headers["x-streamlearn-score"]
        assert route["known"] is (route["answered_by"] == "regime") is ("@" in route["model"])
    assert [route["regime"] for route in routes[:3]] == [1, 2, 3]
    assert [route["publication"] for route in routes] == [1] * 5
    assert routes[0].keys() == {"regime", "score", "known", "answered_by", "model", "publication"}
    wrong: list[Any] = [[], [{}], ["a"], [{"prompt": "a", "messages": []}], [{"prompt": "a"}] * (MAX_PROMPTS + 1)]
    for faulty in wrong:
        answer = client.post("/v1/route", json={"prompts": faulty})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")


def test_unknown_fields_are_forwarded_unread(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """As they came, to one server only."""
    fields = {"prompt": "a", "temperature": 0.1, "guided_json": {"a": [1, None]}, "seed": 2**60}
    client.post(TEXT, json={"model": "nano", **fields})
    assert [body for upstream in upstreams for body in upstream.answered] == [{"model": "nano", **fields}]


@pytest.mark.parametrize(("status", "stream"), [(200, False), (200, True), (429, False)])
def test_headers_of_limits_and_traces_pass_through(
    client: httpx2.Client, upstreams: list[StubUpstream], *, status: int, stream: bool
) -> None:
    """Whatever the status is; credentials and other headers do not, and what the gateway says of itself stands."""
    for upstream in upstreams:
        upstream.headers = (
            "Retry-After: 17\r\nX-Request-Id: up-1\r\nX-RateLimit-Remaining-Requests: 3\r\nserver: uvicorn\r\n"
            "set-cookie: a=b\r\nx-streamlearn-model: false\r\n"
        )
        if status != 200:
            upstream.script.append(str(status))
    sent = {"traceparent": "00-0af7-b7ad-01", "tracestate": "a=1,b=2", "x-request-id": "req-77"}
    private = {"authorization": "Bearer secret", "cookie": "secret", "x-api-key": "secret"}
    body = {"model": "nano", "prompt": "a", "stream": stream}
    answer = client.post(TEXT, json=body, headers={**sent, **private})
    assert answer.status_code == status
    passed = {name: answer.headers[name] for name in ("retry-after", "x-request-id", "x-ratelimit-remaining-requests")}
    assert passed == {"retry-after": "17", "x-request-id": "up-1", "x-ratelimit-remaining-requests": "3"}
    assert not {"set-cookie", "server"} & answer.headers.keys()
    assert answer.headers["x-streamlearn-model"] == "nano"
    [head] = [head for upstream in upstreams for head in upstream.heads]
    assert all(f"\r\n{name}: {value}\r\n" in head for name, value in sent.items())
    assert "secret" not in head


def test_several_prompts_of_one_model_are_one_request(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    first = prompts_of_each_task()[0]
    answer = ask(client, [first, first + " again"])
    assert answer.json()["model"] == "streamlearn-regime-1@184-5d3c1f"
    assert sum(len(upstream.answered) for upstream in upstreams) == 1


def test_prompts_of_several_models_are_refused(client: httpx2.Client) -> None:
    error = error_of(ask(client, prompts_of_each_task()))
    assert (error["code"], error["param"]) == ("several_models", "prompt")
    assert (
        "streamlearn-regime-1@184-5d3c1f, streamlearn-regime-2@184-5d3c1f, streamlearn-regime-3@184-5d3c1f"
        in error["message"]
    )


def test_too_many_prompts_to_route_are_refused(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """However short they are; for a named model they are forwarded."""
    answer = ask(client, ["a"] * (MAX_PROMPTS + 1))
    assert answer.status_code == 400
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("invalid", "prompt")
    assert "at most 128 prompts" in error_of(answer)["message"]
    assert ask(client, ["a"] * MAX_PROMPTS).status_code == 200
    assert ask(client, ["a"] * (MAX_PROMPTS + 1), model="nano").status_code == 200


def test_routing_ends_when_the_client_leaves(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt under way."""
    routed = []

    def route_slowly(_: LoadedPublication, prompt: Prompt) -> Target:
        time.sleep(0.05)
        routed.append(prompt)
        return Target("nano", score=0.0)

    monkeypatch.setattr(LoadedPublication, "route", route_slowly)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{client.base_url}{TEXT}", json={"model": "streamlearn", "prompt": ["a"] * 100}, timeout=0.3)
    wait_until(lambda: metric(client, "requests_total", "unknown", "cancelled") == 1, "the end of the request")
    time.sleep(0.1)
    begun = len(routed)
    time.sleep(0.3)
    assert len(routed) == begun < 100


def test_a_faulty_request_is_refused_in_openais_form(client: httpx2.Client, upstreams: list[StubUpstream]) -> None:
    """One that a model server refuses, once and in that server's words."""
    for body, status, code, param in (
        (b"{", 400, "not_json", None),
        (b"[]", 400, "invalid", None),
        (b'{"prompt": "a"}', 400, "invalid", "model"),
        (b'{"model": "streamlearn"}', 400, "invalid", "prompt"),
        (b'{"model": "streamlearn", "prompt": ""}', 400, "unusable_prompt", None),
        (b'{"model": "streamlearn-regime-9", "prompt": "a"}', 404, "model_not_found", "model"),
    ):
        answer = client.post(TEXT, content=body, headers={"content-type": "application/json"})
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert not re.search(r"\d{6}", error["message"]), "a limit that nobody set"
    for upstream in upstreams:
        upstream.script.append("400")
    assert ask(client, "a", model="nano").json()["error"]["message"] == "scripted"
    assert sum(len(upstream.answered) for upstream in upstreams) == 1
    assert metric(client, "requests_total", "nano", "refused") == 1


def test_a_body_that_is_nested_too_deeply_is_refused(client: httpx2.Client) -> None:
    """Wherever it can no longer be read, or no longer be forwarded."""
    for depth, status in ((254, 200), (255, 400), (1100, 400)):
        nested = b"[" * (depth - 1) + b"]" * (depth - 1)
        body = b'{"model": "nano", "prompt": "a", "max_tokens": 1, "guided": %b}' % nested
        answer = client.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert metric(client, "requests_total", "refused") == 2


def test_without_a_token_none_is_asked_for(client: httpx2.Client) -> None:
    """Nothing here changes state, so every other request has the error that it would have with a token."""
    for headers in ({}, {"authorization": "Bearer unused"}):
        posted, deleted = client.post("/v1/models", headers=headers), client.delete(TEXT, headers=headers)
        nowhere = client.post("/v1/embeddings", headers=headers)
        assert (posted.status_code, error_of(posted)["code"]) == (405, "method_not_allowed")
        assert (deleted.status_code, error_of(deleted)["code"]) == (405, "method_not_allowed")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")


def test_the_guards_are_the_daemons(client: httpx2.Client) -> None:
    """Foreign hosts and sites, forms and large bodies are refused, in OpenAI's form on OpenAI's paths."""
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert error_of(client.get("/v1/models", headers={"origin": "https://evil.example"}))["code"] == "foreign_origin"
    assert error_of(client.post(TEXT, content=b"{}"))["code"] == "wrong_content_type"
    large = client.post(TEXT, content=b"x" * ((4 << 20) + 1), headers={"content-type": "application/json"})
    assert large.status_code == 413
    chunked = client.post(TEXT, content=iter([b"x" * (5 << 20)]), headers={"content-type": "application/json"})
    assert error_of(chunked)["message"] == "the body is larger than 4,194,304 bytes"


def test_a_required_token_is_required_for_all_but_health(published: Path, upstreams: list[StubUpstream]) -> None:
    """And never sent to the model servers."""
    with gateway(published, *upstreams, token=TOKEN, token_file=published / "token") as client:
        wait_until(lambda: is_ready(client), "readiness")
        assert error_of(client.get("/v1/models"))["code"] == "no_token"
        assert "--token-file" in error_of(client.get("/v1/models"))["message"]
        assert client.post("/v1/embeddings").status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert ask(client, "a", model="nano").status_code == 200


def test_it_is_ready_when_a_server_has_the_backbone(published: Path) -> None:
    """And alive at once."""
    with StubUpstream(["streamlearn-regime-1@184-5d3c1f"]) as upstream, gateway(published, upstream) as client:
        assert client.get("/livez").status_code == 200
        wait_until(lambda: "nano" in client.get("/readyz").text, "the publication")
        assert client.get("/readyz").headers["retry-after"] == "2"
        upstream.models.add("nano")
        wait_until(lambda: is_ready(client), "readiness")


def test_it_waits_for_its_first_publication(tmp_path: Path, upstreams: list[StubUpstream]) -> None:
    """Requests are told when to come again, not where the files are."""
    with gateway(tmp_path, *upstreams) as client:
        wait_until(lambda: "cannot be read" in client.get("/readyz").text, "the refusal")
        answer = ask(client, "a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert str(tmp_path) not in answer.text


def test_metrics_count_what_was_answered(client: httpx2.Client) -> None:
    """By model without its version, and by outcome."""
    ask(client, prompts_of_each_task()[0])
    ask(client, "a", model="missing")
    assert metric(client, "requests_total", "streamlearn-regime-1", "answered") == 1
    assert metric(client, "requests_total", "unknown", "refused") == 1
    assert metric(client, "routing_seconds_count") == 1
    assert metric(client, "publication_sequence") == 1
    assert metric(client, "upstream_models") == 8
    assert metric(client, "upstream_in_flight") == 0


def test_prompts_have_every_form_of_openais_and_no_other() -> None:
    for value, prompts in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ):
        assert completion_prompts(value) == prompts
    others: list[Any] = [None, 1, [], [[]], ["a", 1], [-1], [1 << 31], [True], [[1], "a"], {}]
    for other in others:
        with pytest.raises(ApiError) as caught:
            completion_prompts(other)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_only_role_and_content_of_a_message_decide() -> None:
    """Parts of text are joined; a call of a tool has no text."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert messages_prompt(messages) == ({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""})
    for value, param in (
        (None, "messages"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ):
        with pytest.raises(ApiError) as caught:
            messages_prompt(value)
        assert (caught.value.status, caught.value.param) == (400, param)
