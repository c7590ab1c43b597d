"""Text of tokens that come one by one: each piece as soon as its characters are complete."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "�"  # what a tokenizer writes for bytes that are not a character, or not yet


class IncrementalText:
    """Decodes tokens to pieces of text that join to the text of all tokens.

    A token is decoded after those of the piece before, because tokenizers treat the first token of a text differently.
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str]) -> None:
        """`to_text` decodes tokens; the text of more tokens extends the text of fewer."""
        self._to_text = to_text
        self._tokens: list[int] = []  # those of the last piece, then those without a piece yet
        self._num_written = 0
        self._written = ""

    def add(self, token: int) -> str:
        """The text that the token completes; empty in the middle of a character."""
        self._tokens.append(token)
        piece = self.flush()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._tokens = self._tokens[self._num_written :]
            self._num_written = len(self._tokens)
            self._written = self._to_text(self._tokens)
        return piece

    def flush(self) -> str:
        """The rest at the end of the text: incomplete characters."""
        return self._to_text(self._tokens)[len(self._written) :]
