"""The bearer token: required for writing, and for every request where other machines can connect."""

import os
import secrets
import stat
from pathlib import Path

from streamlearn.errors import ConfigError
from streamlearn.settings import Settings

NAME = "http.token"
MIN_CHARS = 32
_BYTES = 32


def token_path(settings: Settings) -> Path:
    """Path of the token file."""
    return settings.serve.token_file or settings.state / NAME


def obtain(settings: Settings) -> str:
    """The daemon's token. Without `serve.token_file` it is created in the state folder if missing.

    Raises:
        ConfigError: the file cannot be read, its token is too short, or other users may read it.
    """
    path = token_path(settings)
    if settings.serve.token_file is None and not path.exists():
        _create(path)
    return read(path)


def read(path: Path) -> str:
    """Read the token from a file.

    Raises:
        ConfigError: see `obtain`.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"{path}: expected a file readable by its owner only, found mode {stat.S_IMODE(mode):o}; run chmod 600"
        )
    if len(token) < MIN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: expected at least {MIN_CHARS} printable characters without spaces, found {len(token)}; "
            "create one with openssl rand -hex 32"
        )
    return token


def _create(path: Path) -> None:
    """Write the file atomically."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the state folder, at the first start
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be written: {error}") from error
