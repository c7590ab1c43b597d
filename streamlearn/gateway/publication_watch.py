"""Taking up publications while requests are answered.

1. Once a second the folder is examined, in a worker thread.
2. A new publication is read completely beside the one in use. If it cannot be read, the old one stays in use, and
   reading is tried again.
3. If no server has one of its versions, the old publication stays in use for as long as its own versions are all
   served: then one is complete and the other is not. Otherwise the new one is taken up.
4. It replaces the old one in one assignment. Requests keep the publication under which they began.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from streamlearn.errors import PublicationError
from streamlearn.events import Event, get_logger
from streamlearn.gateway.fleet import Fleet
from streamlearn.gateway.metrics import GatewayMetrics

INTERVAL_S = 1.0

if TYPE_CHECKING:
    from streamlearn.gateway.published_folder import LoadedPublication, PublishedFolder

_log = get_logger("gateway")


class PublicationWatch:
    """The publication in use. Used by one event loop."""

    def __init__(self, folder: Path, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self.current: LoadedPublication | None = None
        """The publication for requests that begin now; None before the first."""
        self.refusal = f"{folder}: not read yet"
        """Why the newest publication is not in use, for as long as there is none."""
        self._path = folder
        self._folder: PublishedFolder | None = None
        self._fleet = fleet
        self._metrics = metrics
        self._next: LoadedPublication | None = None
        self._version: object = None
        self._delayed = -1

    async def run(self) -> None:
        """Examine the folder again and again, until cancelled."""
        while True:
            try:
                await self.examine()
            except Exception:  # noqa: BLE001 - what is in use stays in use, and the next publication may be better
                _log.exception(Event.PUBLICATION_REFUSED, reason="unexpected")
            await asyncio.sleep(INTERVAL_S)

    async def examine(self) -> None:
        """Steps 1 to 4, once."""
        folder = self._folder or await asyncio.to_thread(_opened, self._path)
        self._folder = folder
        version = await asyncio.to_thread(folder.version)  # 1.
        if version is None or version != self._version:
            await self._read(folder, version)
        if self._next is not None and await self._may_replace(self._next):
            self._take_up(self._next)

    async def _read(self, folder: "PublishedFolder", version: object) -> None:
        """Step 2."""
        try:
            self._next = await asyncio.to_thread(folder.load)
        except PublicationError as error:
            if str(error) != self.refusal:
                self.refusal = str(error)
                self._metrics.refusals.inc()
                _log.warning(Event.PUBLICATION_REFUSED, reason=self.refusal)
            return
        self._version = version

    async def _may_replace(self, new: "LoadedPublication") -> bool:
        """Step 3."""
        if self.current is None:
            return True
        old_models, new_models = ({*each.publication.adapters} for each in (self.current, new))
        if not self._fleet.has_all(new_models):
            await self._fleet.poll()  # what was loaded just before the publication
        if self._fleet.has_all(new_models) or not self._fleet.has_all(old_models):
            return True
        sequence = new.publication.sequence
        if self._delayed != sequence:
            self._delayed = sequence
            missing = sorted(new_models - self._fleet.models)
            _log.warning(Event.PUBLICATION_DELAYED, sequence=sequence, not_served=missing)
        return False

    def _take_up(self, new: "LoadedPublication") -> None:
        """Step 4."""
        self.current, self._next, self.refusal = new, None, ""
        publication = new.publication
        self._metrics.publication.set(publication.sequence)
        _log.info(
            Event.PUBLICATION_TAKEN_UP,
            sequence=publication.sequence,
            snapshot=publication.snapshot,
            adapters=publication.adapters,
        )


def _opened(folder: Path) -> "PublishedFolder":
    """Imported here, in a worker thread: tokenizers take most of a second, and the process answers in the meantime."""
    from streamlearn.gateway.published_folder import PublishedFolder  # noqa: PLC0415

    return PublishedFolder(folder)
