"""What an operator decided about regimes: their names, which are frozen, and which may be published.

A frozen regime keeps its slot: it is neither dropped nor merged when a new regime needs one. Decisions about slots are
made when a record is read, ahead of training, and are made again when it is read again after a restart. So what counts
is whether the regime was frozen when the record was read first.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any

from streamlearn.errors import RegimeError

NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9 ._:/+-]{0,62}[A-Za-z0-9._:/+-])?")
"""Begins with a letter, so that no name is taken for a number."""


class RegimeControls:
    """Names and frozen regimes, by the number of the regime, which is never reused."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Those of the regimes that have one."""
        self.num_changes = 0
        """By the operator, ever. A snapshot of the same step with another number is another state."""
        self.approved: dict[int, int] = {}
        """Step at which an operator let a regime be published although its answers changed."""
        self._toggles: dict[int, list[int]] = {}
        """Records that had been read when a regime was frozen, unfrozen, frozen again and so on."""

    @property
    def frozen(self) -> frozenset[int]:
        """Numbers of the regimes that are frozen."""
        return frozenset(number for number, toggles in self._toggles.items() if len(toggles) % 2)

    def frozen_at(self, ordinal: int) -> set[int]:
        """Numbers of the regimes that were frozen when the record was read first."""
        return {number for number, toggles in self._toggles.items() if bisect_left(toggles, ordinal) % 2}

    def rename(self, number: int, name: str) -> None:
        """Give a regime a name; an empty one removes it.

        Raises:
            RegimeError: the name has other characters or another length, or is another regime's.
        """
        if name:
            self._check(number, name)
        self.num_changes += name != self.names.get(number, "")
        self.names.pop(number, None)
        if name:
            self.names[number] = name

    def set_frozen(self, number: int, is_frozen: bool, *, read: int, trained: int) -> None:
        """Freeze or unfreeze a regime. Safe to repeat.

        Args:
            number: The regime's.
            is_frozen: Whether it is frozen from now on.
            read: Records read so far, those ahead of training among them.
            trained: Records that are done and will not be read again.
        """
        toggles = self._toggles.setdefault(number, [])
        if (number in self.frozen) != is_frozen:
            toggles.append(read)
            self.num_changes += 1
        while len(toggles) > 1 and toggles[1] <= trained:
            del toggles[:2]

    def inherit(self, parent: int, number: int, *, declared_at: int) -> None:
        """A regime was split from another: if that one is frozen, so is this one, from the split on.

        Its first record that is read as frozen does not depend on how far was read ahead, unlike with an operator.
        """
        if parent in self.frozen:
            self._toggles[number] = [declared_at]

    def approve(self, number: int, step: int) -> None:
        """Let versions of a regime from this step on replace earlier ones. Safe to repeat."""
        self.num_changes += self.approved.get(number) != step
        self.approved[number] = step

    def drop(self, number: int) -> None:
        """Forget what was decided about a regime that is dropped."""
        self.names.pop(number, None)
        self.approved.pop(number, None)
        self._toggles.pop(number, None)
        self.num_changes += 1

    def keep(self, numbers: Collection[int]) -> None:
        """Forget what was decided about all other regimes: they are no longer remembered."""
        self.names = {number: name for number, name in self.names.items() if number in numbers}
        self.approved = {number: step for number, step in self.approved.items() if number in numbers}
        self._toggles = {number: toggles for number, toggles in self._toggles.items() if number in numbers}

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        toggles = {str(number): self._toggles[number] for number in sorted(self._toggles) if self._toggles[number]}
        names = {str(number): self.names[number] for number in sorted(self.names)}
        approved = {str(number): self.approved[number] for number in sorted(self.approved)}
        values = {"names": names, "frozen": toggles, "num_changes": self.num_changes}
        return {**values, "approved": approved} if approved else values

    def load_json(self, values: Mapping[str, Any]) -> None:
        """The inverse of `to_json`; an empty mapping where nothing was decided."""
        self.names = {int(number): name for number, name in values.get("names", {}).items()}
        self._toggles = {int(number): list(toggles) for number, toggles in values.get("frozen", {}).items()}
        self.approved = {int(number): step for number, step in values.get("approved", {}).items()}
        self.num_changes = values.get("num_changes", 0)

    def _check(self, number: int, name: str) -> None:
        if not NAME.fullmatch(name):
            raise RegimeError(
                "a regime's name must be 1 to 64 letters, digits, spaces and . _ : / + -, begin with a letter and not "
                f"end with a space, found {name[:80]!r}; choose another, or an empty one to remove the name"
            )
        owner = next((other for other, own in self.names.items() if own == name and other != number), None)
        if owner is not None:
            raise RegimeError(
                f"a regime's name must be unique, found {name!r} at regime {owner}; choose another, or rename regime "
                f"{owner} first"
            )
