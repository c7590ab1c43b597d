"""Files with a secret: a password, a token, a private key. One rule says who may read them."""

import os
import stat
from pathlib import Path

from streamlearn.errors import ConfigError


def check_secret_file(path: Path) -> None:
    """Check who may read a file with a secret, as PostgreSQL does for its private key.

    Only its owner may. A file of another user, such as root, must be readable by this process, so its group may read it
    too: Kubernetes gives a Secret to a pod by `fsGroup`.

    Raises:
        ConfigError: others may read or write it.
        OSError: there is no such file.
    """
    found = path.stat()
    is_own = found.st_uid == os.geteuid()
    mode = stat.S_IMODE(found.st_mode)
    if mode & (0o077 if is_own else 0o037):
        readers, right, default = ("owner only", "600", "0400") if is_own else ("owner and group only", "640", "0440")
        raise ConfigError(
            f"{path}: expected a file readable by its {readers}, found mode {mode:o}; run chmod {right}, or set "
            f"defaultMode: {default} of a Kubernetes Secret"
        )


def read_secret(path: Path, *, what: str = "secret") -> str:
    """Return the first line of a file with a secret.

    Raises:
        ConfigError: it cannot be read, its first line is empty, or others may read it.
    """
    try:
        check_secret_file(path)
        secret = path.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the {what} cannot be read: {error}") from error
    if not secret:
        raise ConfigError(f"{path}: expected the {what} in the first line, found nothing")
    return secret
