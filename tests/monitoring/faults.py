"""The faults: one for each alert, on a stage that is healthy before, in an order that disturbs the next ones least."""

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamlearn.model_files import NANO, load_tokenizer
from streamlearn.publish.publication import FILE
from tests.gateway.sample_publication import publish_sample
from tests.monitoring.stage import Stage

TOO_SMALL = 256 << 10  # bytes: larger than the journal and the record of what is in hand, smaller than a snapshot


@dataclass(frozen=True)
class Fault:
    """What is done to the stage, and the alerts that must fire then."""

    alerts: tuple[str, ...]
    what: str
    make: Callable[[Stage], object]
    fix: Callable[[Stage], object] = lambda stage: None


def _garbage(stage: Stage) -> None:
    stage.feed([line for record in stage.records(2, 40) for line in (record, b"not a record")])


def _nan(stage: Stage) -> None:
    stage.feed([*stage.records(2, 16), *stage.spoiled(16), *stage.records(2, 16)])


def _alternating(stage: Stage) -> None:
    """Until the alert fires: how many turns fit into the rule's window depends on the machine."""
    for _ in range(20):
        stage.learn([record for turn in range(10) for record in stage.records(turn % 2, 40)])
        if "StreamlearnShiftStorm" in stage.prometheus.firing():
            return


def _poisoned(stage: Stage) -> None:
    """The second task comes back, and goes on with answers that nobody could learn.

    Had it come back with such answers, it would have been taken for a new task.
    """
    stage.learn(stage.records(1, 60))
    tokenizer, noise = load_tokenizer(NANO), random.Random(20)
    words = [tokenizer.decode([number]).strip() for number in range(1000, len(tokenizer))]
    stage.learn([stage.records(1, 1, completion=" " + " ".join(noise.choices(words, k=8)))[0] for _ in range(200)])


def _one_adapter(stage: Stage) -> None:
    """One LoRA for all that is learned, as fine-tuning has: the second task costs it the first."""
    stage.start_over(adapter={"preset": "lora"}, learner={"lr": 1e-2})
    stage.learn(stage.records(1, 160))
    stage.learn(stage.records(2, 160))
    stage.learn(stage.records(0, 160))


def _full_disk(stage: Stage) -> None:
    _limit_files(stage, TOO_SMALL)
    stage.feed(stage.records(1, 200))


def _room_again(stage: Stage) -> None:
    _limit_files(stage, resource.RLIM_INFINITY)
    stage.wait(lambda: stage.value("streamlearn_degraded") == 0, "snapshots are written again")


def _limit_files(stage: Stage, size: int) -> None:
    _, hard = resource.prlimit(stage.daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(stage.daemon.pid, resource.RLIMIT_FSIZE, (size, hard))


def _flood(stage: Stage) -> None:
    """More each second than can be trained on, for longer than the rule's window."""
    for _ in range(40):
        stage.feed([record for task in (0, 1, 2) for record in stage.records(task, 100)])
        if "StreamlearnLagGrowing" in stage.prometheus.firing():
            return


def _silence(stage: Stage) -> None:
    stage.learn(())


def _broker_again(stage: Stage) -> None:
    stage.broker.start()
    stage.wait(lambda: stage.value("streamlearn_source_up") == 1, "the source answers again")


def _pause(stage: Stage) -> None:
    stage.command("pause")
    stage.feed(stage.records(2, 40))


def _no_routing(stage: Stage) -> None:
    """A file where the folder of the routing states was."""
    (stage.published / "routing").rename(stage.published / "away")
    (stage.published / "routing").touch()


def _routing_again(stage: Stage) -> None:
    (stage.published / "routing").unlink()
    (stage.published / "away").rename(stage.published / "routing")


def _refused_adapters(stage: Stage) -> None:
    stage.replica.refusal, stage.replica.loaded = "no", {}


def _accepted_adapters(stage: Stage) -> None:
    stage.replica.refusal = None


def _half_a_publication(stage: Stage) -> None:
    path = stage.gateway_published / FILE
    path.write_bytes(path.read_bytes()[:-40])


def _no_upstream(stage: Stage) -> None:
    stage.upstream.kill()
    for _ in range(600):
        stage.ask("a", gateway=True)
        if "StreamlearnGatewayErrors" in stage.prometheus.firing():
            return
        time.sleep(0.2)


FAULTS = (
    Fault(("StreamlearnPublicationFailing",), "no routing state can be written", _no_routing, _routing_again),
    Fault(("StreamlearnReplicaLacksVersions",), "a server refuses adapters", _refused_adapters, _accepted_adapters),
    Fault(("StreamlearnReplicaDown",), "a server is stopped", lambda s: s.replica.stop(), lambda s: s.replica.start()),
    Fault(
        ("StreamlearnPublicationRefused",),
        "half of a publication is there",
        _half_a_publication,
        lambda s: publish_sample(s.gateway_published, sequence=2),
    ),
    Fault(
        ("StreamlearnGatewayErrors", "StreamlearnUpstreamDown"),
        "the gateway's only server is killed",
        _no_upstream,
        lambda s: s.upstream.start(),
    ),
    Fault(("StreamlearnGatewayDown",), "the gateway is killed", lambda s: s.gateway.kill()),
    Fault(("StreamlearnDeadLetters",), "every second record is not JSON", _garbage),
    Fault(("StreamlearnUpdatesRefused",), "the loss of two batches is NaN", _nan),
    Fault(("StreamlearnSourceQuiet",), "no record arrives", _silence),
    Fault(("StreamlearnShiftStorm",), "two tasks alternate every 40 records", _alternating),
    Fault(
        ("StreamlearnLossRising",), "a poisoned segment: a known task, and from some point on wrong answers", _poisoned
    ),
    Fault(
        ("StreamlearnDegraded", "StreamlearnSnapshotTooOld"),
        "no room: no file of the daemon may exceed 256 KiB",
        _full_disk,
        _room_again,
    ),
    Fault(
        ("StreamlearnSourceStalled",), "the broker is stopped", lambda s: s.broker.stop(), lambda s: s.broker.start()
    ),
    Fault(
        ("StreamlearnNotLearning",), "the daemon is paused while records arrive", _pause, lambda s: s.command("resume")
    ),
    Fault(("StreamlearnLagGrowing",), "records arrive faster than they are learned", _flood),
    Fault(("StreamlearnForgetting",), "one adapter without protection learns one task after the other", _one_adapter),
    Fault(("StreamlearnNotReady",), "the training loop hangs", lambda s: s.feed(s.endless())),
    Fault(("StreamlearnDown",), "the daemon is killed", lambda s: s.daemon.end()),
)


@contextmanager
def injected(stage: Stage, fault: Fault) -> Iterator[None]:
    fault.make(stage)
    yield
    fault.fix(stage)
