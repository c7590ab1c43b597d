"""The daemon's endpoint, on which the guards and the server are tested, and a certificate for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import _shared, client, daemon

__all__ = ["_shared", "client", "daemon"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate chain of localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "cert.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-keyout", str(key), "-out", str(chain), "-days", "2", *name]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key
