"""Figures of the gateway benchmark. It starts three processes, which takes some seconds."""

import pytest

from benchmarks import gateway


@pytest.mark.long
def test_a_short_run_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails, torch is not loaded, and what the gateway adds is the difference."""
    monkeypatch.setattr(gateway, "STARTS", 1)
    found = gateway.measure(seconds=2.0, requests_per_s=20.0)
    assert (found["requests"], found["failed"], found["torch"]) == (40, 0, False)
    assert 0 < found["live_s"] <= found["ready_s"]
    for name in ("p50_ms", "p95_ms", "p99_ms"):
        assert found["added"][name] == pytest.approx(found["gateway"][name] - found["direct"][name], abs=0.01)
