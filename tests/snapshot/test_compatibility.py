"""The configuration changes under which a snapshot can be continued."""

from typing import Any

import pytest

from streamlearn.errors import SnapshotMismatchError
from streamlearn.settings import Settings, fingerprint
from streamlearn.snapshot.manifest import Change, Manifest, check_compatible

from .kit import ADAPTER, BACKBONE, CONFIG, draft


def manifest(**changed: Any) -> Manifest:
    return Manifest.from_draft(draft(18204, **changed), {})


def test_an_unset_option_that_is_newer_than_the_snapshot_is_no_change() -> None:
    assert check_compatible(manifest(), {**CONFIG, "newest": None}, BACKBONE, ADAPTER) == []
    with pytest.raises(SnapshotMismatchError, match="newest is 3 here and absent in the snapshot"):
        check_compatible(manifest(), {**CONFIG, "newest": 3}, BACKBONE, ADAPTER)


def test_a_real_configuration_equals_its_own_fingerprint() -> None:
    settings = Settings.model_validate({"source": {"jsonl": {"path": "x.jsonl"}}})
    stored = Manifest.from_bytes(manifest(config=fingerprint(settings)).to_bytes(), where="m")
    assert check_compatible(stored, fingerprint(settings), BACKBONE, ADAPTER) == []


def test_another_quantization_computes_other_losses_and_is_refused() -> None:
    for kind in ("int8", "nf4"):
        config = {**CONFIG, "backbone": {"quantization": kind}}
        assert check_compatible(manifest(config=config), config, BACKBONE, ADAPTER) == []
        with pytest.raises(SnapshotMismatchError, match=r"with this configuration: backbone\.quantization"):
            check_compatible(manifest(), config, BACKBONE, ADAPTER, accept=True)


def test_the_message_of_a_changed_value_names_key_values_and_remedies() -> None:
    config = {**CONFIG, "learner": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    with pytest.raises(SnapshotMismatchError) as caught:
        check_compatible(manifest(), config, BACKBONE, ADAPTER)
    assert str(caught.value) == (
        "snapshot 00018204 was trained with another configuration: learner.lr is 0.001 here and 0.0001 in the "
        "snapshot; set learner.lr back to 0.0001, accept the change with --accept-config-change, or start over with "
        "--fresh, which keeps the old snapshots in another folder"
    )
    assert check_compatible(manifest(), config, BACKBONE, ADAPTER, accept=True) == [Change("learner.lr", 0.0001, 0.001)]


def test_more_regimes_may_be_remembered_than_before_and_not_fewer() -> None:
    before, more = ({**CONFIG, "shift": {"max_regimes": number}} for number in (32, 256))
    changes = check_compatible(manifest(config=before), more, BACKBONE, ADAPTER, accept=True)
    assert changes == [Change("shift.max_regimes", 32, 256)]
    with pytest.raises(SnapshotMismatchError, match=r"shift\.max_regimes is 32 here and 256 in the snapshot"):
        check_compatible(manifest(config=more), before, BACKBONE, ADAPTER, accept=True)


def test_the_check_of_returns_acts_on_what_comes() -> None:
    """A change of its level must be accepted, and may be."""
    checked, unchecked = ({**CONFIG, "probe": {"max_returns_refused": level}} for level in (0.01, 0.0))
    assert len(check_compatible(manifest(config=checked), unchecked, BACKBONE, ADAPTER, accept=True)) == 1
    with pytest.raises(SnapshotMismatchError, match="accept the change"):
        check_compatible(manifest(config=checked), unchecked, BACKBONE, ADAPTER)


@pytest.mark.parametrize("section", ["backbone", "adapter", "seedling"])
def test_other_sections_are_never_accepted(section: str) -> None:
    config = {**CONFIG, section: {"rank": 8}}
    with pytest.raises(SnapshotMismatchError, match=rf"{section}\.rank is 8 here and absent") as caught:
        check_compatible(manifest(), config, BACKBONE, ADAPTER, accept=True)
    assert "--accept-config-change" not in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_another_backbone_is_never_accepted() -> None:
    with pytest.raises(SnapshotMismatchError, match=r'another backbone: backbone.digest is "77d01b" here and "3f2a9c"'):
        check_compatible(manifest(), CONFIG, {**BACKBONE, "digest": "77d01b"}, ADAPTER, accept=True)


def test_another_adapter_is_never_accepted() -> None:
    with pytest.raises(SnapshotMismatchError, match=r"another adapter: adapter.rank is 8 here and 4 in the snapshot"):
        check_compatible(manifest(), CONFIG, BACKBONE, {**ADAPTER, "rank": 8}, accept=True)


def test_a_moved_backbone_of_the_same_files_is_the_same() -> None:
    """The digest decides if both sides have one."""
    old = {**CONFIG, "backbone": {"model": "models/a"}}
    new = {**CONFIG, "backbone": {"model": "elsewhere/a"}}
    assert check_compatible(manifest(config=old), new, {**BACKBONE, "model": "elsewhere/a"}, ADAPTER) == []
    unknown = {**BACKBONE, "digest": None}
    with pytest.raises(SnapshotMismatchError, match="another backbone"):
        check_compatible(manifest(config=old, backbone=unknown), new, {**unknown, "model": "elsewhere/a"}, ADAPTER)
