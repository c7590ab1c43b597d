"""A run in several processes, which compute shares of each step."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamlearn.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class ProcessRank:
    """One process of a run."""

    rank: int = 0
    """Number of the process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of the process on its host, from 0: that of its GPU."""

    @property
    def leads(self) -> bool:
        """Whether this process reads the stream and owns all state."""
        return self.rank == 0


def find_rank(environ: Mapping[str, str]) -> ProcessRank:
    """Read the variables that torchrun sets. Without them, or with one process, a run is not distributed.

    Raises:
        ConfigError: some of the variables are missing or no numbers.
    """
    given = {name: environ[name] for name in VARIABLES if name in environ}
    if "WORLD_SIZE" not in given:
        return ProcessRank()
    try:
        rank, size, local_rank = (int(given[name]) for name in VARIABLES)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(VARIABLES)} must all be numbers when WORLD_SIZE is set, found {given}: start the processes "
            "with torchrun, or unset WORLD_SIZE"
        ) from error
    return ProcessRank(rank, size, local_rank)
