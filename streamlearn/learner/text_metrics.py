"""Metrics that compare a generated text with its reference."""

from unicodedata import east_asian_width

_PUNCTUATION = ".,;:!?\"'()[]。，、；：！？「」（）"


def normalise(text: str) -> list[str]:
    """Split into lower-case words without surrounding punctuation; wide characters (Chinese, Japanese) are words.

    >>> normalise("The  Answer: 42.")
    ['the', 'answer', '42']
    """
    spaced = "".join(f" {letter} " if east_asian_width(letter) in "WF" else letter for letter in text.lower())
    stripped = (word.strip(_PUNCTUATION) for word in spaced.split())
    return [word for word in stripped if word]


def exact_match(output: str, reference: str) -> float:
    """Return 1.0 if both have the same words after `normalise`, else 0.0.

    >>> exact_match("Positive.", " positive")
    1.0
    """
    return float(normalise(output) == normalise(reference))


def rouge_l(output: str, reference: str) -> float:
    """Compute the F1 of the longest common subsequence of words, in [0, 1] (Lin 2004, eq. 2-4 with beta = 1).

    >>> round(rouge_l("the cat sat", "the cat lay down"), 3)
    0.571
    """
    found, expected = normalise(output), normalise(reference)
    if not found or not expected:
        return float(found == expected)
    common = _longest_common_subsequence(found, expected)
    return 2 * common / (len(found) + len(expected))


def _longest_common_subsequence(left: list[str], right: list[str]) -> int:
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = lengths[column]
            lengths[column] = diagonal + 1 if word == other else max(above, lengths[column - 1])
            diagonal = above
    return lengths[-1]
