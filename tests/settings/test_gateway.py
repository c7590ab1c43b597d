"""The gateway's settings: what is refused before anything is bound."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from streamlearn.settings import GatewaySettings

UPSTREAM = "http://10.0.0.1:8000"


def settings(**changes: Any) -> GatewaySettings:
    return GatewaySettings(**{"published": Path("p"), "upstreams": (UPSTREAM,), **changes})


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert (settings().host, settings().port, settings().open_to_others) == ("127.0.0.1", 8084, False)


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


def test_an_upstream_is_named_once_and_there_is_one() -> None:
    for upstreams in ((), (UPSTREAM, UPSTREAM), (UPSTREAM, f"{UPSTREAM}/")):
        with pytest.raises(ValidationError, match="upstreams"):
            settings(upstreams=upstreams)


def test_the_upstreams_token_is_not_sent_in_plain_text_to_other_machines() -> None:
    """Unless that is allowed; over TLS, or on this machine, it may be."""
    token = {"upstream_token_file": Path("t")}
    with pytest.raises(ValidationError, match=r"http://10\.0\.0\.1:8000 is plain HTTP .*--allow-plaintext"):
        settings(**token)
    assert settings(**token, allow_plaintext=True).upstreams == (UPSTREAM,)
    assert settings(**token, upstreams=("https://10.0.0.1", "http://127.0.0.1:1/")).upstreams[1] == "http://127.0.0.1:1"


def test_messages_name_the_commands_options() -> None:
    assert [settings().key(each) for each in ("token_file", "names", "upstreams")] == [
        "--token-file",
        "--name",
        "--upstream",
    ]
