"""The gateway's options: what cannot work is refused before anything is bound."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamlearn.cli import main as cli
from streamlearn.cli.gateway import gateway_settings, run_gateway
from streamlearn.daemon.process import StopSignals
from streamlearn.errors import ConfigError, UsageError

OPTIONS = {"published": Path("p"), "upstreams": ("http://10.0.0.1:8000",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upstreams": ("10.0.0.1",)}, "upstreams: expected http://HOST:PORT"),
        ({"upstreams": ()}, "give --upstream URL, --upstream-dns HOST:PORT, or both"),
        ({"upstream_dns": "vllm"}, "upstream_dns: expected text of the form"),
        ({"upstream_dns": "vllm:8000", "upstream_token_file": Path("t")}, "plain HTTP to another machine"),
        ({"canary": "110%"}, "canary: expected at most 1, found"),
        ({"canary": "0%"}, "canary: expected more than 0, found"),
        ({"host": "0.0.0.0"}, "not a loopback address"),  # noqa: S104
        ({"tls_certfile": Path("c")}, "tls_certfile and tls_keyfile belong together"),
    ],
)
def test_options_that_cannot_work_are_a_usage_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gateway_settings(**OPTIONS | options)


def test_a_token_file_requires_the_token() -> None:
    assert gateway_settings(**OPTIONS, token_file=Path("t")).require_token
    assert not gateway_settings(**OPTIONS).require_token


def test_an_unreadable_token_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token cannot be read"):
        run_gateway(gateway_settings(**OPTIONS, token_file=tmp_path / "none"), StopSignals())


def test_folder_and_upstream_are_required() -> None:
    result = CliRunner().invoke(cli.app, ["gateway"])
    assert result.exit_code == 2
    assert "--published" in result.output
