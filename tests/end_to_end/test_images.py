"""Image-text records from a real broker: learned exactly once, and evaluated over HTTP."""

import random
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from tests.broker import Broker
from tests.end_to_end.process import DaemonProcess, ForkedDaemon, configuration
from tests.learners import differences
from tests.vision import as_base64, make_image, tiny_vision_backbone

PER_TASK, PER_BATCH, TAIL = 120, 8, 16
KINDS = (
    ("what colour is the fox in this picture of the dog?", " red", True),
    ("the quick brown fox jumps over the lazy dog and says", " hello", False),
    ("is there a test of the small world here, and what is it?", " Paris", True),
)
BAD = (
    {"prompt": "a", "completion": "b", "image": "no base64!"},
    {"prompt": "a", "completion": "b", "image": as_base64(make_image()[:80])},
    {"prompt": "a", "completion": "b", "image": as_base64(b"GIF89a....")},
    {"text": "a", "image": as_base64(make_image())},
    {"prompt": "a", "completion": "b", "image": [as_base64(make_image())] * 9},
)
GOOD = len(KINDS) * PER_TASK
STEPS = GOOD // PER_BATCH

pytestmark = pytest.mark.broker


def records() -> list[bytes]:
    """Three tasks, two of them with images of their own size, with unusable records mixed in, and a tail."""
    rows: list[dict[str, Any]] = []
    for number, (question, answer, has_image) in enumerate(KINDS):
        for i in range(PER_TASK):
            image = {"image": as_base64(make_image(i % 7 + 50 * number, (40 + 20 * number, 40)))} if has_image else {}
            rows.append({"prompt": f"{question} {i % 5}", "completion": answer, **image})
    tail = [rows[-1]] * TAIL
    rng = random.Random(3)
    for bad in BAD:
        rows.insert(rng.randrange(len(rows)), dict(bad))
    return [orjson.dumps(row) for row in rows + tail]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_backbone(tmp_path_factory.mktemp("backbone"), "llava")


def settings(broker: Broker, topic: str, dead: str, backbone: Path) -> dict[str, Any]:
    """Small probes and frequent snapshots; the log has the port of the endpoint."""
    return {
        **configuration(broker, topic, dead, backbone, PER_BATCH),
        "probe": {"warmup_tokens": 256, "similarity_tokens": 128},
        "snapshot": {"every_records": 80},
        "learner": {"lr": 1e-3, "rehearsal": 0.25, "rehearsal_records": 16},
        # By default losses decide what answers an unknown request, and the runs measure them at different times.
        "serve": {"port": 0, "unknown": "nearest"},
        "log": {"style": "json", "level": "info"},
    }


def ask(daemon: DaemonProcess) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of the running daemon: two image questions evaluated with generated answers, and one generation."""
    examples = [
        {"prompt": f"{KINDS[0][0]} 1", "completion": KINDS[0][1], "image": as_base64(make_image(seed))}
        for seed in (1, 2)
    ]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{as_base64(make_image(1))}"}}
    question = {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]}
    url = f"http://127.0.0.1:{daemon.events('http_started')[-1]['port']}"
    with httpx2.Client(base_url=url, timeout=60) as client:
        evaluated = client.post("/v1/eval", json={"examples": examples, "generate": True, "max_new_tokens": 4})
        body = {"model": "streamlearn", "messages": [question], "max_tokens": 4, "temperature": 0}
        generated = client.post("/v1/chat/completions", json=body)
    assert (evaluated.status_code, generated.status_code) == (200, 200), (evaluated.text, generated.text)
    return evaluated.json(), generated.json()


@pytest.mark.long
def test_killed_three_times_the_final_state_equals_an_uninterrupted_run(
    broker: Broker, backbone: Path, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """Every tensor is bit-equal, also images of samples; every unusable image is one dead letter with a reason."""
    runs, answers = {}, {}
    for name, kills in (("whole", []), ("killed", [9, 21, 34])):
        topic, dead = broker.new_topic(), broker.new_topic()
        broker.produce(topic, records())
        daemon = ForkedDaemon(tmp_path / name, settings(broker, topic, dead, backbone))
        daemons.append(daemon)
        daemon.learn(STEPS, kills)
        answers[name] = ask(daemon)
        assert daemon.terminate() == 0
        runs[name] = daemon.newest()
        reasons = sorted(
            dict(m.headers)["__streamlearn.errors.exception.class.name"].decode() for m in broker.read_all(dead)
        )
        assert reasons == ["bad_form", "bad_image", "bad_image", "bad_image", "too_large"]
        assert runs[name].ledger() == {0: (GOOD, len(BAD), GOOD + len(BAD))}

    whole, killed = runs["whole"].tensors(), runs["killed"].tensors()
    assert differences(whole, killed) == []
    for sample in ("holdouts", "rehearsal"):
        assert whole[f"regimes.regimes[].{sample}.records[].images[]"].numel() > 1000
        assert whole[f"regimes.regimes[].{sample}.records[].images[lengths]"].sum() > 5
    onsets = [report.shift.onset for report in runs["whole"].regimes().reports]
    assert onsets == [1, PER_TASK + 1, 2 * PER_TASK + 1]
    for one, other in zip(answers["whole"], answers["killed"], strict=True):
        for varying in ("seconds", "id", "created"):
            one.pop(varying, None)
            other.pop(varying, None)
        assert one == other
    assert answers["whole"][0]["per_example"][0]["loss"] != answers["whole"][0]["per_example"][1]["loss"]
