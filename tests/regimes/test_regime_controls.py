"""What an operator decided about regimes is kept by number, and refused where it cannot be."""

import pytest

from streamlearn.errors import RegimeError
from streamlearn.regimes.statistics import RegimeControls


@pytest.mark.parametrize("name", ["a", "Orders EU", "team/fraud:v1.2+beta-3_x", "x" * 64])
def test_a_name_is_kept(name: str) -> None:
    """Giving it again is no change."""
    controls = RegimeControls()
    for _ in range(2):
        controls.rename(3, name)
        assert (controls.names, controls.num_changes) == ({3: name}, 1)


@pytest.mark.parametrize("name", [" a", "a ", "3", "-a", "a\n", "a|b", "é", "x" * 65])
def test_a_name_of_other_characters_is_refused(name: str) -> None:
    """It would need escaping somewhere, or be taken for a number."""
    controls = RegimeControls()
    with pytest.raises(RegimeError, match="must be 1 to 64 letters"):
        controls.rename(3, name)
    assert (controls.names, controls.num_changes) == ({}, 0)


def test_a_name_is_unique_until_it_is_removed() -> None:
    """The message names the regime that has it."""
    controls = RegimeControls()
    controls.rename(3, "orders")
    with pytest.raises(RegimeError, match="found 'orders' at regime 3; choose another"):
        controls.rename(4, "orders")
    controls.rename(3, "")
    controls.rename(4, "orders")
    assert controls.names == {4: "orders"}


def test_whether_a_regime_is_frozen_depends_on_when_a_record_was_read() -> None:
    """Records that had been read before a decision are not affected by it, also when they are read again."""
    controls = RegimeControls()
    for is_frozen, read in ((True, 10), (True, 15), (False, 20), (True, 30)):
        controls.set_frozen(3, is_frozen, read=read, trained=0)
    frozen = [ordinal for ordinal in range(50) if controls.frozen_at(ordinal)]
    assert frozen == [*range(11, 21), *range(31, 50)]
    assert controls.frozen == {3}
    assert controls.num_changes == 3


def test_decisions_about_records_that_are_done_are_forgotten() -> None:
    """What is kept does not grow with the number of decisions."""
    controls = RegimeControls()
    for read in range(10, 1000, 10):
        controls.set_frozen(3, read % 20 > 0, read=read, trained=read - 5)
    assert controls.frozen == {3}
    assert len(controls.to_json()["frozen"]["3"]) < 4


def test_the_state_round_trips() -> None:
    """Older snapshots have none."""
    controls, other = RegimeControls(), RegimeControls()
    controls.rename(12, "orders")
    controls.set_frozen(3, True, read=10, trained=4)
    controls.set_frozen(12, True, read=11, trained=4)
    other.load_json(controls.to_json())
    assert other.to_json() == controls.to_json()
    assert (other.frozen, other.names, other.num_changes) == (frozenset({3, 12}), {12: "orders"}, 3)
    other.load_json({})
    assert (other.frozen, other.names, other.num_changes) == (frozenset(), {}, 0)


def test_a_regime_that_is_no_longer_remembered_leaves_nothing() -> None:
    """Its name is free again."""
    controls = RegimeControls()
    controls.rename(3, "orders")
    controls.set_frozen(3, True, read=10, trained=4)
    controls.keep([4, 5])
    controls.rename(4, "orders")
    assert (controls.frozen, controls.names) == (frozenset(), {4: "orders"})
