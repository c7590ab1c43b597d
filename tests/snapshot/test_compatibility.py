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


def test_the_message_of_a_changed_value_names_key_values_and_remedies() -> None:
    config = {**CONFIG, "learner": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    with pytest.raises(SnapshotMismatchError) as caught:
        check_compatible(manifest(), config, BACKBONE, ADAPTER)
    assert str(caught.value) == (
        "snapshot 00018204 was trained with another configuration: learner.lr is 0.001 here and 0.0001 in the "
        "snapshot; set learner.lr back to 0.0001, accept the change with --accept-config-change, or start over with "
        "--fresh, which keeps the old snapshots in another folder"
    )


@pytest.mark.parametrize(
    ("section", "key", "before", "after"),
    [
        ("learner", "lr", 1e-4, 1e-3),
        ("shift", "max_regimes", 32, 256),
        ("probe", "max_returns_refused", 0.01, 0.0),  # acts on what comes
    ],
)
def test_a_change_must_be_accepted_and_may_be(section: str, key: str, before: float, after: float) -> None:
    stored, config = ({**CONFIG, section: {key: value}} for value in (before, after))
    with pytest.raises(SnapshotMismatchError, match="accept the change"):
        check_compatible(manifest(config=stored), config, BACKBONE, ADAPTER)
    changes = check_compatible(manifest(config=stored), config, BACKBONE, ADAPTER, accept=True)
    assert changes == [Change(f"{section}.{key}", before, after)]


@pytest.mark.parametrize(
    ("config", "backbone", "adapter", "message"),
    [
        ({"backbone": {"quantization": "nf4"}}, {}, {}, r'backbone\.quantization is "nf4" here and absent'),
        ({"adapter": {"rank": 8}}, {}, {}, r"adapter\.rank is 8 here and absent"),
        ({"shift": {"max_regimes": 32}}, {}, {}, r"shift\.max_regimes is 32 here and 256 in the snapshot"),
        ({}, {"digest": "77d01b"}, {}, r'another backbone: backbone.digest is "77d01b" here and "3f2a9c"'),
        ({}, {}, {"rank": 8}, r"another adapter: adapter.rank is 8 here and 4 in the snapshot"),
    ],
)
def test_what_computes_other_values_is_never_accepted(
    config: dict[str, Any], backbone: dict[str, Any], adapter: dict[str, Any], message: str
) -> None:
    """Another quantization, backbone or adapter, and fewer regimes than are remembered."""
    common = {**CONFIG, "shift": {"max_regimes": 256}}
    with pytest.raises(SnapshotMismatchError, match=message) as caught:
        check_compatible(
            manifest(config=common), {**common, **config}, {**BACKBONE, **backbone}, {**ADAPTER, **adapter}, accept=True
        )
    assert "--accept-config-change" not in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_a_moved_backbone_of_the_same_files_is_the_same() -> None:
    """The digest decides if both sides have one."""
    old = {**CONFIG, "backbone": {"model": "models/a"}}
    new = {**CONFIG, "backbone": {"model": "elsewhere/a"}}
    assert check_compatible(manifest(config=old), new, {**BACKBONE, "model": "elsewhere/a"}, ADAPTER) == []
    unknown = {**BACKBONE, "digest": None}
    with pytest.raises(SnapshotMismatchError, match="another backbone"):
        check_compatible(manifest(config=old, backbone=unknown), new, {**unknown, "model": "elsewhere/a"}, ADAPTER)
