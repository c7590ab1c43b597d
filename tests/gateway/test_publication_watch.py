"""New publications while requests are answered: taken up whole, or not at all."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from structlog.testing import capture_logs

from streamlearn.publish.publication import FILE, Publication
from tests.gateway.sample_publication import publish_sample, served_models
from tests.gateway.stub_upstream import StubUpstream

from .kit import ask, metric, prompts_of_each_task, ready_gateway, wait_until

TASKS = 3


def in_use(client: httpx2.Client) -> int:
    """Sequence number of the publication in use."""
    return int(metric(client, "publication_sequence"))


def load(upstreams: list[StubUpstream], publication: Publication) -> None:
    """What a publisher does before it writes the publication."""
    for upstream in upstreams:
        upstream.models |= served_models(publication)


def halve(folder: Path) -> None:
    """Half of a publication, as a copy would leave it; written at once, so that it is refused once."""
    half = folder / "half"
    half.write_bytes((folder / FILE).read_bytes()[:-40])
    half.rename(folder / FILE)


def name_another_state(folder: Path) -> None:
    """A publication whose routing state is missing."""
    old = Publication.read(folder)
    old.model_copy(update={"sequence": 2, "routing": "routing/none.safetensors"}).write(folder)


@contextmanager
def asking(client: httpx2.Client) -> Iterator[list[httpx2.Response]]:
    """Routed requests, a few at a time, for the length of the block; all of their answers."""
    answers: list[httpx2.Response] = []
    stop = threading.Event()

    def keep_asking(worker: int) -> None:
        prompts = prompts_of_each_task()
        with httpx2.Client(base_url=client.base_url, timeout=20.0) as own:
            while not stop.is_set():
                answers.append(ask(own, prompts[worker % TASKS]))

    with ThreadPoolExecutor(TASKS) as pool:
        workers = [pool.submit(keep_asking, worker) for worker in range(TASKS)]
        try:
            yield answers
        finally:
            stop.set()
        for future in workers:
            future.result()


def publications_of(answers: list[httpx2.Response]) -> set[int]:
    """The publications that the answers so far came from."""
    return {int(answer.headers["x-streamlearn-publication"]) for answer in [*answers] if answer.status_code == 200}


def test_publications_change_under_load_without_a_lost_or_a_mixed_answer(
    client: httpx2.Client, published: Path, upstreams: list[StubUpstream]
) -> None:
    """Each answer's model belongs to the publication that its header names."""
    versions = {1: 184, 2: 186, 3: 187, 4: 188}
    with asking(client) as answers:
        wait_until(lambda: bool(answers), "an answer from the first publication")
        for sequence in (2, 3, 4):
            for upstream in upstreams:
                upstream.models |= {f"streamlearn-regime-{number}@{versions[sequence]}-5d3c1f" for number in (1, 2, 3)}
            publish_sample(published, versions[sequence], sequence=sequence)
            wait_until(lambda sequence=sequence: sequence in publications_of(answers), "an answer from the publication")  # type: ignore[misc]
            if sequence > 2:  # a publisher unloads the old versions some time after
                for upstream in upstreams:
                    upstream.models -= {
                        f"streamlearn-regime-{number}@{versions[sequence - 2]}-5d3c1f" for number in (1, 2, 3)
                    }
    assert {answer.status_code for answer in answers} == {200}
    assert publications_of(answers) == {1, 2, 3, 4}
    for answer in answers:
        version = versions[int(answer.headers["x-streamlearn-publication"])]
        model = f"streamlearn-regime-{answer.headers['x-streamlearn-regime']}@{version}-5d3c1f"
        assert answer.json()["model"] == answer.headers["x-streamlearn-model"] == model


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (halve, "expected JSON"),
        (name_another_state, "none.safetensors: the routing state cannot be read"),
    ],
    ids=["half", "no routing state"],
)
def test_a_damaged_publication_changes_nothing(
    client: httpx2.Client, published: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """It is an event, once; the old publication answers, and the next good one is taken up."""
    with capture_logs() as events:
        damage(published)
        wait_until(lambda: metric(client, "publication_refusals_total") == 1, "the refusal")
        assert ask(client, prompts_of_each_task()[0]).json()["model"] == "streamlearn-regime-1@184-5d3c1f"
        publish_sample(published, 184, sequence=3)
        wait_until(lambda: in_use(client) == 3, "the next publication")
    [refused] = [event for event in events if event["event"] == "publication_refused"]
    assert reason in refused["reason"]
    assert metric(client, "publication_refusals_total") == 1


def test_a_publication_that_no_server_has_waits_while_the_old_one_is_served(
    client: httpx2.Client, published: Path, upstreams: list[StubUpstream]
) -> None:
    """Once it is served, it is taken up; never are both in use for one request."""
    with capture_logs() as events:
        publication = publish_sample(published, 200, sequence=2)
        wait_until(lambda: any(event["event"] == "publication_delayed" for event in events), "the event")
        assert ask(client, prompts_of_each_task()[0]).json()["model"] == "streamlearn-regime-1@184-5d3c1f"
        load(upstreams[:1], publication)
        wait_until(lambda: in_use(client) == 2, "the publication")
    assert ask(client, prompts_of_each_task()[0]).json()["model"] == "streamlearn-regime-1@200-5d3c1f"
    [delayed] = [event for event in events if event["event"] == "publication_delayed"]
    assert delayed["not_served"] == [f"streamlearn-regime-{number}@200-5d3c1f" for number in (1, 2, 3)]


def test_a_publication_is_taken_up_once_the_old_one_is_gone_too(
    client: httpx2.Client, published: Path, upstreams: list[StubUpstream]
) -> None:
    """Then requests for what no server has are 503, and those for the backbone are answered."""
    publish_sample(published, 200, sequence=2)
    for upstream in upstreams:
        upstream.models.discard("streamlearn-regime-2@184-5d3c1f")
    wait_until(lambda: in_use(client) == 2, "the publication")
    assert ask(client, prompts_of_each_task()[0]).status_code == 503
    assert ask(client, "a", model="nano").status_code == 200


def test_a_regime_that_is_held_back_is_answered_by_the_backbone(
    client: httpx2.Client, published: Path, upstreams: list[StubUpstream]
) -> None:
    load(upstreams, publish_sample(published, 185, sequence=2, held_back=(1,)))
    wait_until(lambda: in_use(client) == 2, "the publication")
    answer = ask(client, prompts_of_each_task()[0])
    assert (answer.json()["model"], answer.headers["x-streamlearn-regime"]) == ("nano", "1")


def test_a_canary_gets_its_share_of_the_requests(published: Path, upstreams: list[StubUpstream]) -> None:
    """By the prompt: the same on each gateway. It ends when the servers unload what it replaced."""
    prompts = [f"{prompts_of_each_task()[0]} {number}" for number in range(200)]

    def publications(client: httpx2.Client) -> list[int]:
        answers = client.post("/v1/route", json={"prompts": [{"prompt": prompt} for prompt in prompts[:100]]}).json()
        answers["routes"] += client.post("/v1/route", json={"prompts": [{"prompt": p} for p in prompts[100:]]}).json()[
            "routes"
        ]
        return [route["publication"] for route in answers["routes"]]

    with (
        ready_gateway(published, *upstreams, canary="25%") as client,
        ready_gateway(published, *upstreams, canary="25%") as other,
    ):
        load(upstreams, publish_sample(published, 186, sequence=2))
        wait_until(lambda: in_use(client) == in_use(other) == 2, "the publication")
        chosen = publications(client)
        assert 30 <= chosen.count(2) <= 70
        assert chosen == publications(other)
        for prompt, publication in zip(prompts[:20], chosen, strict=False):
            answer = ask(client, prompt)
            assert answer.headers["x-streamlearn-publication"] == str(publication)
            assert answer.json()["model"] == f"streamlearn-regime-1@{({1: 184, 2: 186})[publication]}-5d3c1f"
        assert metric(client, "request_seconds_count", "previous") == chosen[:20].count(1)
        for upstream in upstreams:
            upstream.models.discard("streamlearn-regime-2@184-5d3c1f")
        wait_until(lambda: set(publications(client)) == {2}, "the end of the canary")


def test_a_version_that_is_withdrawn_answers_nothing_more(published: Path, upstreams: list[StubUpstream]) -> None:
    """A publication without it is used by all requests at once."""
    with ready_gateway(published, *upstreams, canary="10%") as client:
        publish_sample(published, 184, sequence=2, held_back=(1,))
        wait_until(lambda: in_use(client) == 2, "the publication")
        for number in range(20):
            assert ask(client, f"{prompts_of_each_task()[0]} {number}").json()["model"] == "nano"
