"""Sections: frozen, no unknown keys, addresses of this machine, the gateway's options, and the generated reference."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from docs.generate import settings_reference as reference
from streamlearn.settings import GatewaySettings, Settings
from streamlearn.settings.section import is_loopback, section_type


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),  # noqa: S104 - every address of the machine
        ("10.0.0.1", False),
        ("broker.example", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, expected: bool) -> None:
    """A name other than localhost is not resolved."""
    assert is_loopback(host) is expected


UPSTREAM = "http://10.0.0.1:8000"


def settings(**changes: Any) -> GatewaySettings:
    return GatewaySettings(**{"published": Path("p"), "upstreams": (UPSTREAM,), **changes})


def test_other_addresses_need_a_token_and_tls() -> None:
    with pytest.raises(ValidationError, match="set token_file, tls_certfile and tls_keyfile"):
        settings(host="0.0.0.0")  # noqa: S104
    files = {name: Path(name) for name in ("token_file", "tls_certfile", "tls_keyfile")}
    assert settings(host="0.0.0.0", **files).open_to_others  # noqa: S104


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a/v1",
        "http:///v1",
        "http://a:x",
        "http://user:secret@a",
        "http://a?x=1",
        "http://a/?",
        "http://a#b",
    ],
)
def test_an_upstream_is_a_url_of_a_server_and_nothing_more(url: str) -> None:
    """A password is not shown."""
    with pytest.raises(ValidationError, match="without a path, a password or a query") as caught:
        settings(upstreams=(url,))
    assert "secret" not in caught.value.errors()[0]["msg"]


def test_the_upstreams_token_is_not_sent_in_plain_text_to_other_machines() -> None:
    """Unless that is allowed; over TLS, or on this machine, it may be."""
    token = {"upstream_token_file": Path("t")}
    with pytest.raises(ValidationError, match=r"http://10\.0\.0\.1:8000 is plain HTTP .*--allow-plaintext"):
        settings(**token)
    assert settings(**token, allow_plaintext=True).upstreams == (UPSTREAM,)
    assert settings(**token, upstreams=("https://10.0.0.1", "http://127.0.0.1:1/")).upstreams[1] == "http://127.0.0.1:1"


ROWS = {
    cells[1].strip("` "): [cell.strip() for cell in cells[2:-1]]
    for line in reference().splitlines()
    if line.startswith("| `") and (cells := line.split("|"))
}


def keys(model: Any, prefix: str = "") -> list[str]:
    result = list[str]()
    for name, field in model.model_fields.items():
        inner = section_type(field.annotation)
        result += [prefix + name] if inner is None else keys(inner, f"{prefix}{name}.")
    return result


def test_every_key_has_a_row() -> None:
    assert sorted(ROWS) == sorted(keys(Settings))
