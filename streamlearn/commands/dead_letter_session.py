"""One call of `dead-letters replay`: opens what it needs, replays, and closes it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from connectors.open import open_replayer, read_dead_letters
from connectors.replayer import Replayer
from connectors.stored_dead_letter import Repair
from streamlearn.commands import dead_letter_export
from streamlearn.commands.dead_letter_replay import ReplayReport, check_known, replay, replay_mended
from streamlearn.commands.dead_letter_selection import DeadLetterSelection
from streamlearn.settings import Settings


class ReplaySession:
    """Replays into the stream of a configuration."""

    def __init__(self, settings: Settings, *, again: bool, dry_run: bool) -> None:
        """Take the configuration.

        Args:
            settings: Name the dead letters and the stream.
            again: Whether to put back also those that were before.
            dry_run: Whether to put back nothing, and only count.
        """
        self._settings = settings
        self._again = again
        self._dry_run = dry_run

    def selected(self, selection: DeadLetterSelection, report: Callable[[ReplayReport], None]) -> ReplayReport:
        """Put back what is selected, as it is."""
        with closing(self._replayer()) as replayer:
            dead_letters = selection.select(read_dead_letters(self._settings))
            return replay(dead_letters, replayer, self._settings, again=self._again, report=report)

    def mended(self, path: Path, report: Callable[[ReplayReport], None]) -> ReplayReport:
        """Put back the values of an exported file, all of which are checked before."""
        mended = {each.id: each for each in dead_letter_export.read(path, self._settings.stream)}
        check_known(mended, read_dead_letters(self._settings))
        with closing(self._replayer()) as replayer:
            dead_letters = read_dead_letters(self._settings)
            return replay_mended(mended, dead_letters, replayer, self._settings, again=self._again, report=report)

    def _replayer(self) -> Replayer:
        replayer = open_replayer(self._settings)
        return _DryReplayer(replayer) if self._dry_run else replayer


class _DryReplayer:
    """Knows what was put back, and puts nothing back."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.replayed = replayer.replayed
        self.close = replayer.close

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Do nothing."""
