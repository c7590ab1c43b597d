"""The bearer token: who may write to the daemon, and on a machine that others reach, who may ask at all."""

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
    """Where it stands."""
    return settings.serve.token_file or settings.state / NAME


def obtain(settings: Settings) -> str:
    """The daemon's token; without `serve.token_file` it is made when there is none.

    Raises:
        ConfigError: the file cannot be read, is too short, or others may read it.
    """
    path = token_path(settings)
    if settings.serve.token_file is None and not path.exists():
        _make(path)
    return read(path)


def read(path: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: see `obtain`.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path}: the token must be its owner's alone, found mode {stat.S_IMODE(mode):o}: chmod 600")
    if len(token) < MIN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: a token needs {MIN_CHARS} printable characters without spaces, found {len(token)}: "
            "openssl rand -hex 32"
        )
    return token


def _make(path: Path) -> None:
    """Complete or not at all, so that a crash leaves no half of one."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be written: {error}") from error
