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
HIDDEN = ("/opt", "/root", "/run", "/var/lib", "/var/cache")
"""Folders of which a command sees what is mounted only."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--mount", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, check=False
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
    """Run a command to its end, with loopback only, on a file system that is read-only but for `writable` and /tmp.

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
    script = ["set -e", "umask 022", "mount --make-rprivate /", "ip link set lo up", "mount -t tmpfs tmpfs /mnt"]
    script += ["mkdir /mnt/upper /mnt/work"]
    for number, source in enumerate(mounts.values()):  # some lie in folders that are hidden below
        made = f"mkdir /mnt/{number}" if source.is_dir() else f"touch /mnt/{number}"
        script += [made, f"mount --bind {shlex.quote(str(source))} /mnt/{number}"]
    script.append("mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc")
    script += [f"mount -t tmpfs -o mode=755 tmpfs {parent}" for parent in HIDDEN]
    for number, (path, source) in enumerate(mounts.items()):
        place = shlex.quote(path)
        made = f"mkdir -p {place}" if source.is_dir() else f"mkdir -p $(dirname {place}) && touch {place}"
        script += [made, f"mount --bind /mnt/{number} {place}"]
        script += [] if path in writable else [f"mount -o remount,ro,bind {place}"]
    script += [f"mount -o remount,ro {parent}" for parent in ("/etc", *HIDDEN)] + ["mount -o remount,ro,bind /"]
    script += ["mount -t tmpfs -o mode=1777 tmpfs /tmp", "cd /", f"umask {umask}"]
    whole = {**environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}", "--clear-groups", "--no-new-privs"]
    user += ["--bounding-set=-all", "--inh-caps=-all"]
    settings = [f"{name}={value}" for name, value in whole.items()]
    script.append("exec " + shlex.join([*user, "env", "-i", *settings, *command]))
    return subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", "\n".join(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def installed() -> dict[str, Path]:
    """Mounts of this environment's programs where the shipped files have them, and of its Python."""
    return {"/opt/streamlearn": Path(sys.prefix), sys.base_prefix: Path(sys.base_prefix)}
