"""The controls: what an operator can ask of a run."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Control:
    """Something that an operator asks of a run."""

    name: ClassVar[str]

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields, for the audit log."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pause(Control):
    """Take no step and read no record until `Resume`."""

    name = "pause"


@dataclass(frozen=True, slots=True)
class Resume(Control):
    """Go on after `Pause`."""

    name = "resume"


@dataclass(frozen=True, slots=True)
class Pin(Control):
    """Never prune a snapshot."""

    name = "pin"
    snapshot: str


@dataclass(frozen=True, slots=True)
class Unpin(Control):
    """Let a snapshot be pruned again."""

    name = "unpin"
    snapshot: str


@dataclass(frozen=True, slots=True)
class RollBack(Control):
    """Go on from an earlier snapshot, and never train on some records."""

    name = "rollback"
    snapshot: str
    skip_records: tuple[str, ...] = ()
    """Offsets, each `TOPIC:PARTITION:FROM..TO`, or `FROM..TO` where there is one partition."""


@dataclass(frozen=True, slots=True)
class RegimeControl(Control):
    """A change of one regime: training state, which a snapshot makes durable before the answer."""

    number: int


@dataclass(frozen=True, slots=True)
class FreezeRegime(RegimeControl):
    """Train no more on a regime's records."""

    name = "freeze"


@dataclass(frozen=True, slots=True)
class UnfreezeRegime(RegimeControl):
    """Train on a regime's records again."""

    name = "unfreeze"


@dataclass(frozen=True, slots=True)
class RenameRegime(RegimeControl):
    """Give a regime a name."""

    name = "rename"
    new_name: str


@dataclass(frozen=True, slots=True)
class ApproveRegime(RegimeControl):
    """Publish what a regime learned although its answers changed."""

    name = "approve"


@dataclass(frozen=True, slots=True)
class DropRegime(RegimeControl):
    """Forget a regime."""

    name = "drop"
