from dataclasses import replace

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from streamlearn.status import ANSWERED_BY, Phase, SliceScore, Status

from .doubles import RUNNING, Daemon

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(client: httpx2.Client) -> Samples:
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} occurs twice"
            samples[key] = sample.value
    return samples


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"streamlearn_{name}", frozenset(labels.items())]


def test_metrics_equal_the_published_status(client: httpx2.Client) -> None:
    samples = scrape(client)
    expected = {
        "ready": 1,
        "run_steps": 42,
        "regimes": 2,
        "current_regime": 3,
        "average_forgetting_ratio": 0.25,
        "backward_transfer_ratio": -0.125,
        "probe_seconds_total": 7.5,
        "holdout_seconds_total": 1.5,
        "last_step_timestamp_seconds": 1_000_096,
        "records_since_snapshot": 16,
        "source_up": 0,
        "prequential_loss_nats": 2.5,
        "prequential_loss_smoothed_nats": 2.75,
        "last_snapshot_timestamp_seconds": 1_000_090,
        "last_snapshot_step": 40,
        "heartbeat_timestamp_seconds": 1_000_100,
        "jobs_waiting": 0,
        "jobs_capacity": 2,
    }
    assert {name: of(samples, name) for name in expected} == expected
    totals = {"trained": 336, "held_out": 14, "dead_lettered": 4}
    assert {outcome: of(samples, "run_records", outcome=outcome) for outcome in totals} == totals
    assert of(samples, "phase", phase="running") == 1
    assert of(samples, "phase", phase="failed") == 0
    assert of(samples, "position_offset", topic="orders", partition="1") == 140
    assert of(samples, "lag_records", topic="orders", partition="0") == 7
    assert of(samples, "regime_loss_nats", regime="1") == 1.25
    labels = {"backbone": "builtin:nano", "dtype": "float32", "device": "cpu", "preset": "mh-moe"}
    assert of(samples, "build_info", **labels, streamlearn="0.1.0", kafka_python="3.0.12") == 1


def test_canaries_have_a_loss_by_regime_and_slice(daemon: Daemon, client: httpx2.Client) -> None:
    """And one of the untouched backbone by slice."""
    rows = (SliceScore("safety", 8, 2.5, 2.0), SliceScore("general", 9, 1.5, 1.75))
    regimes = (replace(RUNNING.adaptation.regimes[0], canaries=rows, canaries_step=40),)
    daemon.board.publish(replace(RUNNING, adaptation=replace(RUNNING.adaptation, regimes=regimes)))
    samples = scrape(client)
    assert of(samples, "canary_loss_nats", regime="1", slice="safety") == 2.5
    assert of(samples, "canary_backbone_loss_nats", slice="general") == 1.75


def test_unknown_values_are_absent(daemon: Daemon, client: httpx2.Client) -> None:
    """The lag of a partition, the loss of a regime that was never scored, and most before the first step."""
    samples = scrape(client)
    assert ("streamlearn_lag_records", frozenset({("topic", "orders"), ("partition", "1")})) not in samples
    assert ("streamlearn_regime_loss_nats", frozenset({("regime", "3")})) not in samples
    daemon.board.publish(Status(phase=Phase.STARTING))
    names = {name.removeprefix("streamlearn_") for name, _ in scrape(client)}
    assert {"ready", "process_resident_memory_bytes"} < names
    assert not names & {"prequential_loss_nats", "source_up", "current_regime", "regime_loss_nats", "python_info"}


def test_moments_follow_the_monotonic_clock(daemon: Daemon, client: httpx2.Client) -> None:
    """The time since the last step is right even if the wall clock was set in between."""
    daemon.time.monotonic += 10
    daemon.time.wall += 86_400
    samples = scrape(client)
    assert daemon.time.wall - of(samples, "last_step_timestamp_seconds") == 14
    assert daemon.time.wall - of(samples, "heartbeat_timestamp_seconds") == 10


def test_requests_are_counted_by_what_answered_them(client: httpx2.Client) -> None:
    """All combinations from the start; and what answers the unknown, with the losses that decided."""
    samples = scrape(client)
    counts = {
        (known, answered_by): of(samples, "requests_total", known=known, answered_by=answered_by)
        for known in ("true", "false")
        for answered_by in ANSWERED_BY
    }
    assert {how: count for how, count in counts.items() if count} == {("true", "regime"): 40, ("false", "backbone"): 3}
    for answered_by, used, loss in (("mean", 0, 3.375), ("nearest", 0, 3.5), ("backbone", 1, 3.25)):
        assert of(samples, "unknown_answered_by", answered_by=answered_by) == used
        assert of(samples, "unknown_loss_nats", answered_by=answered_by) == loss


def test_counters_of_the_process_are_served(daemon: Daemon, client: httpx2.Client) -> None:
    """Each as often as it was counted, however often it is scraped."""
    counters = daemon.board.counters
    before = scrape(client)
    counters.step_seconds.observe(0.2)
    counters.update(RUNNING, replace(RUNNING, step=45, records_trained=340))
    scrape(client)
    after = scrape(client)
    names = ("steps_total", "records_trained_total", "step_seconds_count")
    assert [of(after, name) - of(before, name) for name in names] == [3, 4, 1]
    grown = {
        le: of(after, "step_seconds_bucket", le=le) - of(before, "step_seconds_bucket", le=le)
        for le in ("0.1", "0.25", "+Inf")
    }
    assert grown == {"0.1": 0, "0.25": 1, "+Inf": 1}
