"""A command as a service manager or a container engine starts it: with its user, environment and mounts only."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARENTS = ("/etc", "/opt", "/run", "/var/lib", "/var/cache")
"""Folders that mounts lie in; what the machine has there, except in /etc, is hidden."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--mount", "mount", "--make-rprivate", "/"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="mounts and another user need root",
)


def run_confined(
    command: Sequence[str],
    environ: Mapping[str, str],
    mounts: Mapping[str, Path],
    *,
    uid: int,
    gid: int | None = None,
    umask: str = "0022",
    writable: Collection[str] = (),
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end on a file system that is read-only except for `writable` and an empty /tmp.

    Args:
        command: As the unit or image has it.
        environ: The whole environment, but for where this checkout's packages are.
        mounts: Files and folders by their path for the command.
        uid: Its user, without capabilities and without other groups.
        gid: Its group; by default as the user.
        umask: Mode bits that new files do not get.
        writable: Mounts that it may write to.
        timeout_s: Time after which it is killed.
    """
    script = ["set -e", "mount --make-rprivate /", "mount -t tmpfs tmpfs /mnt", "mkdir /mnt/upper /mnt/work"]
    script.append("mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc")
    script += [f"mount -t tmpfs -o mode=755 tmpfs {parent}" for parent in PARENTS[1:]]
    for path, source in mounts.items():
        place, origin = shlex.quote(path), shlex.quote(str(source))
        made = f"mkdir -p {place}" if source.is_dir() else f"mkdir -p $(dirname {place}) && touch {place}"
        script += [made, f"mount --bind {origin} {place}"]
        script += [] if path in writable else [f"mount -o remount,ro,bind {place}"]
    script += [f"mount -o remount,ro{',bind' if parent == '/' else ''} {parent}" for parent in ("/", *PARENTS)]
    script += ["mount -t tmpfs -o mode=1777 tmpfs /tmp", "cd /", f"umask {umask}"]
    whole = {**environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}", "--clear-groups", "--no-new-privs"]
    user += ["--bounding-set=-all", "--inh-caps=-all"]
    settings = [f"{name}={value}" for name, value in whole.items()]
    script.append("exec " + shlex.join([*user, "env", "-i", *settings, *command]))
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def installed() -> dict[str, Path]:
    """Mount of this environment's programs where the shipped files have them."""
    return {"/opt/streamlearn": Path(sys.prefix)}
