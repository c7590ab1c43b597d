"""The result of a control, apart from `results`: commands that only ask the daemon load no snapshots."""

from streamlearn.controls.control import Control
from streamlearn.controls.state_controls import StateControls
from streamlearn.jobs.results import ControlResult


def control_result(
    control: Control, controls: StateControls, *, changed: bool, moved: list[str], newest: str | None
) -> ControlResult:
    """What holds after a control."""
    return ControlResult(
        control=control.name,
        changed=changed,
        paused=controls.paused,
        pinned=tuple(sorted(controls.pins)),
        skipped_records=tuple(map(str, controls.skipped)),
        moved_aside=tuple(moved),
        snapshot=newest,
    )
