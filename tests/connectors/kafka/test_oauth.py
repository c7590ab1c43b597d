"""OAuth tokens: against a broker whose sessions end with the token, and what is wrong before there is a token."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from connectors.kafka.security import OAuthTokens, TokenError
from connectors.kafka.source import KafkaSource
from streamlearn.errors import CredentialsError, SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import Position
from tests.broker import Broker, needed_kafka, running
from tests.connectors.kafka.doubles import SteppingClock, settings
from tests.connectors.kafka.secured import CLIENT, SECRET, OAuthBroker, TokenEndpoint, unsigned_token


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    yield from running(OAuthBroker(needed_kafka(), tmp_path_factory.mktemp("oauth")))


@pytest.fixture
def endpoint() -> Iterator[TokenEndpoint]:
    server = TokenEndpoint(lifetime_s=3.0)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def client(endpoint: TokenEndpoint, secret: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauthbearer_token_endpoint_url": endpoint.url,
        "sasl_oauthbearer_client_id": CLIENT,
        "sasl_oauthbearer_client_secret_file": secret,
        **overrides,
    }


def oauth(**values: Any) -> KafkaSettings:
    return settings(security_protocol="SASL_PLAINTEXT", **{"sasl_mechanism": "OAUTHBEARER", **values})


def read_through(broker: OAuthBroker, configured: KafkaSettings, seconds: float) -> tuple[list[int], list[int]]:
    """Write and read a record at a time; return their numbers and what was read."""
    (topic,) = configured.topics
    source = KafkaSource(configured, start_timeout_s=10.0)
    written: list[int] = []
    found: list[int] = []
    source.seek(Position())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(found) < len(written):
        if time.monotonic() < deadline:
            broker.produce(topic, [b"%d" % len(written)])
            written.append(len(written))
        found += [int(record.value or b"-1") for record in source.poll(max_records=10, timeout_s=0.2)]
        assert time.monotonic() < deadline + 60.0, "records are missing"
    source.commit(Position({origin: len(found) for origin in source.reached}), "note")
    source.close()
    return written, found


@pytest.mark.broker
@pytest.mark.usefixtures("leaked_sockets")
class TestBroker:
    """Sessions of three seconds, on a broker that closes a connection whose token has expired."""

    def test_tokens_are_renewed_while_records_are_read(
        self, tokens: OAuthBroker, endpoint: TokenEndpoint, secret: Path
    ) -> None:
        """Each record once, over several lifetimes of a token, without a new connection; a scope is requested."""
        topic = tokens.new_topic()
        configured = tokens.by_token(topic, **client(endpoint, secret, sasl_oauthbearer_scope="read"))
        with capture_logs() as logs:
            written, found = read_through(tokens, configured, 12.0)
        assert found == written
        assert len(endpoint.requests) >= 4
        assert endpoint.requests[0] == {"grant_type": ["client_credentials"], "scope": ["read"]}
        assert [entry for entry in logs if entry["log_level"] != "info"] == []
        assert tokens.committed(configured.group_id) == {(topic, 0): (len(written), "note")}

    def test_a_token_file_is_read_for_each_session(self, tokens: OAuthBroker, tmp_path: Path) -> None:
        """Another program renews it."""
        topic, path = tokens.new_topic(), tmp_path / "token"
        path.write_text(unsigned_token(3.0))
        path.chmod(0o600)
        source = KafkaSource(tokens.by_token(topic, sasl_oauthbearer_token_file=path), start_timeout_s=10.0)
        source.seek(Position())
        for number in range(8):
            path.write_text(unsigned_token(3.0) + "\n")
            tokens.produce(topic, [b"%d" % number])
            (record,) = source.poll(max_records=1, timeout_s=10.0)
            assert record.value == b"%d" % number
            time.sleep(0.8)
        source.close()

    def test_an_expired_token_and_a_wrong_secret_are_named(
        self, tokens: OAuthBroker, endpoint: TokenEndpoint, tmp_path: Path
    ) -> None:
        expired, wrong = tmp_path / "expired", tmp_path / "wrong"
        expired.write_text(unsigned_token(-100.0))
        wrong.write_text("wrong")
        for file in (expired, wrong):
            file.chmod(0o600)
        for overrides, message in (
            ({"sasl_oauthbearer_token_file": expired}, "the token|, password or token can cause this"),
            (
                client(endpoint, wrong),
                "must return an access_token, found status 401 and invalid_client no such secret: ",
            ),
        ):
            source = KafkaSource(tokens.by_token("any", **overrides), start_timeout_s=1.0)
            with pytest.raises(SourceError, match=message):
                source.seek(Position())
            source.close()


def test_a_token_is_used_for_four_fifths_of_its_lifetime(endpoint: TokenEndpoint, secret: Path) -> None:
    """Then another is requested; one without a lifetime is used once."""
    clock = SteppingClock()
    endpoint.lifetime_s = 10.0
    provider = OAuthTokens(oauth(**client(endpoint, secret)), clock=clock)
    first = provider.token()
    clock.sleep(7.9)
    assert provider.token() == first
    clock.sleep(0.2)
    assert provider.token() != first
    assert len(endpoint.requests) == 2


def test_an_endpoint_that_does_not_answer_is_retried_by_the_client(endpoint: TokenEndpoint, secret: Path) -> None:
    """The error is kafka-python's own kind, so that it closes one connection and tries again."""
    provider = OAuthTokens(oauth(**client(endpoint, secret)))
    endpoint.shutdown()
    endpoint.server_close()
    with pytest.raises(TokenError, match="must answer, found ConnectError"):
        provider.token()


def test_a_missing_secret_is_named_before_any_request(endpoint: TokenEndpoint, tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"sasl\.oauthbearer\.client\.secret\.file: .*cannot be read"):
        OAuthTokens(oauth(**client(endpoint, tmp_path / "missing")))


def test_extensions_are_sent_with_the_token(endpoint: TokenEndpoint, secret: Path) -> None:
    extensions = {"logicalCluster": "lkc-1", "identityPoolId": "pool-1"}
    assert (
        OAuthTokens(oauth(**client(endpoint, secret, sasl_oauthbearer_extensions=extensions))).extensions()
        == extensions
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"OAUTHBEARER needs sasl\.oauthbearer\.token\.endpoint\.url"),
        ({"sasl_oauthbearer_token_file": "t", "sasl_oauthbearer_client_id": "c"}, "replaces an endpoint"),
        ({"sasl_oauthbearer_token_endpoint_url": "http://idp.example/token"}, "must be https"),
        ({"sasl_oauthbearer_token_endpoint_url": "https://u:p@idp.example"}, r"must be https://HOST/PATH; the cred"),
        ({"sasl_mechanism": "AWS_MSK_IAM"}, "AWS_MSK_IAM needs security.protocol SASL_SSL"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    if "sasl_oauthbearer_token_endpoint_url" in values:
        values = {"sasl_oauthbearer_client_id": "c", "sasl_oauthbearer_client_secret_file": "s", **values}
    with pytest.raises(ValidationError, match=message):
        oauth(**values)
