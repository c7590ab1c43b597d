"""Matching of declared shifts to true boundaries."""

from streamlearn.bench.learn.detection_scores import WITHIN, detection_scores


def test_a_shift_within_reach_detects_one_boundary() -> None:
    """The declaration at record 1 does not count; a second shift after a boundary is false."""
    found = detection_scores([1, 205, 210, 300], [200, 400])
    assert found == {"boundaries": 2, "found": 1, "false": 2, "mean_delay_records": 5.0}


def test_a_late_shift_is_false() -> None:
    """A shift counts up to WITHIN records after the boundary."""
    assert detection_scores([1, 200 + WITHIN], [200])["found"] == 1
    late = detection_scores([1, 201 + WITHIN], [200])
    assert (late["found"], late["false"], late["mean_delay_records"]) == (0, 1, None)
