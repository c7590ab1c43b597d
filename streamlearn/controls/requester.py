"""Who asks for a control."""

import getpass
import os
import socket
from dataclasses import dataclass
from typing import Any, Self

MAX_AGENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Requester:
    """A user of the command line, or a client of the HTTP endpoint."""

    user: str | None = None
    """User and host of a command, as `USER@HOST`."""
    peer: str | None = None
    """Address that a request came from."""
    token: bool | None = None
    """Whether the request gave the right bearer token."""
    agent: str | None = None
    """What the client calls itself; not verified."""

    @classmethod
    def of_this_process(cls) -> Self:
        """The user who runs this process."""
        try:
            name = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in a container
            name = str(os.getuid())
        return cls(user=f"{name}@{socket.gethostname()}")

    @classmethod
    def of_request(cls, peer: str | None, *, token: bool, agent: str) -> Self:
        """The client of an HTTP request."""
        return cls(peer=peer or "unknown", token=token, agent=agent[:MAX_AGENT_CHARS])

    def to_json(self) -> dict[str, Any]:
        """The known fields."""
        fields = {"user": self.user, "peer": self.peer, "token": self.token, "agent": self.agent}
        return {name: value for name, value in fields.items() if value is not None}
