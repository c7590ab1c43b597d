"""The choice of step sizes."""

from benchmarks.mot.compare import MODELS, ComparisonSettings, measure
from tests.benchmarks.mot.models import NOISY, SHORT


def test_the_step_size_is_the_best_of_the_grid() -> None:
    """It has the lowest final loss on the tuning seeds."""
    settings = ComparisonSettings(seeds=(0,), step_sizes=(0.001, 30.0), schedule=SHORT)
    measured = measure(settings, NOISY, MODELS[1])
    assert measured.step_size == min(measured.tuning, key=lambda size: measured.tuning[size]) == 30.0
