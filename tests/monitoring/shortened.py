"""The shipped alert rules in a hurry: a minute becomes a second."""

import re

_DURATION = re.compile(r"(?<=\[|\s)(\d+)([mh])(?=\]|\n)")
_SECONDS = re.compile(r"(\d+) \* 60\b")


def shortened(rules: str) -> str:
    r"""The rules with every window, `for` and age divided by 60.

    >>> shortened("expr: time() - x > 30 * 60 and rate(y[15m]) > 60\nfor: 1h\n")
    'expr: time() - x > 30 * 1 and rate(y[15s]) > 60\nfor: 1m\n'
    """
    quick = _DURATION.sub(lambda found: found[1] + {"m": "s", "h": "m"}[found[2]], rules)
    return _SECONDS.sub(r"\1 * 1", quick)
