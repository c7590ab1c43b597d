import dataclasses

import pytest

from streamlearn.status import AdaptationStatus, Phase, RegimeStatus, Scoring, Status


def test_dead_letters_are_summed_over_reasons() -> None:
    assert Status(Phase.RUNNING, dead_letters={"empty": 2, "not_json": 3}).records_dead_lettered == 5


def test_the_current_regime_is_the_one_that_the_stream_is_in() -> None:
    past, current = RegimeStatus(number=1, slot=0), RegimeStatus(number=4, slot=1, current=True)
    assert AdaptationStatus(regimes=(past, current)).current is current
    assert AdaptationStatus(regimes=(past,)).current is None


def test_the_newest_scoring_is_the_last_of_the_history() -> None:
    assert RegimeStatus(number=1, slot=0).now is None
    history = (Scoring(1, 2.0, 0.5), Scoring(9, 1.0, 0.75))
    assert RegimeStatus(number=1, slot=0, history=history).now is history[1]


def test_a_status_is_immutable() -> None:
    """Its default mappings too: they are shared between instances."""
    status = Status(Phase.STARTING)
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.step = 1  # type: ignore[misc]
    for mapping in (status.dead_letters, status.versions, status.adaptation.num_shifts):
        with pytest.raises(TypeError):
            mapping["a"] = 1  # type: ignore[index]
