"""What is kept of one regime: operator's decisions, counts, and the state of all regimes through the codec."""

import pytest

from streamlearn import codec
from streamlearn.errors import RegimeError
from streamlearn.regimes.regime import Regime, RegimesState
from streamlearn.regimes.report import ShiftReport
from streamlearn.shift.detector import Shift
from streamlearn.status import Scoring
from tests.doubles import example
from tests.regimes.shifting_streams import bare_regimes


@pytest.mark.parametrize("name", ["a", "Orders EU", "team/fraud:v1.2+beta-3_x", "x" * 64])
def test_a_name_is_kept(name: str) -> None:
    """Giving it again is no change."""
    regimes = bare_regimes(3)
    for _ in range(2):
        regimes.rename(3, name)
        assert (regimes.by_slot[0].name, regimes.state.num_changes) == (name, 1)


@pytest.mark.parametrize("name", [" a", "a ", "3", "-a", "a\n", "a|b", "é", "x" * 65])
def test_a_name_of_other_characters_is_refused(name: str) -> None:
    """It would need escaping somewhere, or be taken for a number."""
    regimes = bare_regimes(3)
    with pytest.raises(RegimeError, match="must be 1 to 64 letters"):
        regimes.rename(3, name)
    assert (regimes.by_slot[0].name, regimes.state.num_changes) == ("", 0)


def test_a_name_is_unique_until_it_is_removed() -> None:
    """The message names the regime that has it."""
    regimes = bare_regimes(3, 4)
    regimes.rename(3, "orders")
    with pytest.raises(RegimeError, match="found 'orders' at regime 3; choose another"):
        regimes.rename(4, "orders")
    regimes.rename(3, "")
    regimes.rename(4, "orders")
    assert [regime.name for regime in regimes.by_slot.values()] == ["", "orders"]


def test_whether_a_regime_is_frozen_depends_on_when_a_record_was_read() -> None:
    """Records that had been read before a decision are not affected by it, also when they are read again."""
    regime, changes = Regime(3, 0), 0
    for is_frozen, read in ((True, 10), (True, 15), (False, 20), (True, 30)):
        changes += regime.set_frozen(is_frozen, read=read, trained=0)
    frozen = [ordinal for ordinal in range(50) if regime.was_frozen(ordinal)]
    assert frozen == [*range(11, 21), *range(31, 50)]
    assert (regime.is_frozen, changes) == (True, 3)


def test_decisions_about_records_that_are_done_are_forgotten() -> None:
    """What is kept does not grow with the number of decisions."""
    regime = Regime(3, 0)
    for read in range(10, 1000, 10):
        regime.set_frozen(read % 20 > 0, read=read, trained=read - 5)
    assert regime.is_frozen
    assert len(regime.frozen_from) < 4


def test_the_state_survives_the_codec() -> None:
    """Every field of every regime, and values that only some regimes have."""
    shift = Shift("inputs", 1, 2, 4, False, 1, 9, 8, 1.5, 0.5, parent=1)
    one, two = Regime(1, 0, name="orders", frozen_from=[4], visits=2), Regime(2, 4, approved_at=7, refused_return=1)
    one.holdouts.take(example([8, 9, 10]), (0, 0), size=1)
    one.scores.add(Scoring(3, 1.0, 0.5), at_end=True)
    one.losses = [0.1, 2.5]
    state = RegimesState(
        {0: one, 4: two}, current=4, reports=[ShiftReport(shift, 3, started_from=1)], suspected=[shift]
    )
    state.start_losses = [{"backbone": 1.5, "nearest": 0.1}]
    state.num_entries["inputs"] += 2
    arrays, json = codec.dump(state)
    again = codec.load(RegimesState, arrays, json)
    assert (again.reports, again.suspected, again.num_entries) == (state.reports, [shift], {"inputs": 2})
    assert again.regimes[0].scores == one.scores
    assert [record.input_ids.tolist() for record in again.regimes[0].holdouts.examples] == [[8, 9, 10]]
    for name in ("number", "slot", "name", "frozen_from", "approved_at", "refused_return", "visits", "losses"):
        for slot, regime in state.regimes.items():
            assert getattr(again.regimes[slot], name) == getattr(regime, name)
    assert again.start_losses == state.start_losses
