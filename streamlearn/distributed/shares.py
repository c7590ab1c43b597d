"""Which records of a batch each process computes."""

from collections.abc import Sequence


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divide records so that the processes have nearly equal numbers of tokens.

    The longest record not yet given goes to the process with the fewest tokens (Graham 1969, LPT: at most 4/3 of the
    best division's largest share).

    Args:
        lengths: Tokens of each record.
        size: Number of processes.

    Returns:
        The indices of each process, ascending; empty where there are fewer records than processes.
    """
    given: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = tokens.index(min(tokens))
        given[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(each) for each in given]
