"""Figures of the flood benchmark."""

from benchmarks.flood import FloodInterval, summary


def test_latencies_and_speeds_are_summarised() -> None:
    """Percentiles are over all requests; the speed ratio is the median over pairs of intervals."""
    quiet = [FloodInterval([i / 1000 for i in range(100)], 0, 100.0), FloodInterval([0.1] * 100, 1, 200.0)]
    flooded = [FloodInterval([0.2], 2, 50.0), FloodInterval([0.4], 0, 180.0)]
    found = summary(quiet, flooded, rounds=2)
    assert (found["quiet_health_asked"], found["quiet_health_failed"], found["quiet_tokens_per_s"]) == (200, 1, 150)
    assert (found["quiet_health_p50_ms"], found["quiet_health_p99_ms"], found["quiet_health_max_ms"]) == (100, 100, 100)
    assert (found["flooded_health_failed"], found["flooded_health_max_ms"]) == (2, 400.0)
    assert found["training_flooded_over_quiet"] == 0.7
