"""Strings that end a generated text and are not part of it."""

from collections.abc import Sequence

MAX_STRINGS = 4
MAX_CHARS = 256
"""Of one string: the last characters of a text are compared with every beginning of every string."""


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    The first is the one that ends first, the longest of several that end together: what is found depends on the text,
    not on its pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False
        """Whether the text has ended."""

    def add(self, piece: str) -> str:
        """The next part of the text that is certain to be in front of a stop string."""
        text = self._held + piece
        places = [(start + len(each), start) for each in self._strings if (start := text.find(each)) >= 0]
        if places:
            _, start = min(places)
            self.found, self._held = True, ""
            return text[:start]
        cut = len(text) - self._beginning_at_end_of(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The rest of a text that ends without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning_at_end_of(self, text: str) -> int:
        """Length of the longest end of `text` with which a string begins."""
        lengths = (n for each in self._strings for n in range(1, len(each)) if text.endswith(each[:n]))
        return max(lengths, default=0)
