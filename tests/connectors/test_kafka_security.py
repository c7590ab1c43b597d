"""Against a broker as it stands in production: who is let in, what is refused, and whether the message says why."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.kafka.feed import feed
from connectors.kafka.security import refusal, secure_options
from connectors.kafka.source import KafkaSource
from streamlearn.errors import CredentialsError, DeadLetterError, Reason, SourceError
from streamlearn.events import Event
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Position, Record, TopicPartition
from streamlearn.stream.source import DeadLetter
from tests.broker import USER, Broker, needed_kafka, running
from tests.connectors.secured import Authority, SecuredBroker

GROUP = "streamlearn"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    yield from running(SecuredBroker(needed_kafka(), tmp_path_factory.mktemp("secured")))


def read(settings: KafkaSettings, count: int) -> list[bytes | None]:
    """The first records of a topic, through a source that commits behind them."""
    source = KafkaSource(settings, start_timeout_s=10.0)
    try:
        position = source.seek(Position())
        records: list[Record] = []
        while len(records) < count:
            records += source.poll(max_records=count, timeout_s=0.5)
        source.commit(Position({origin: count for origin, _ in position.items()}), "note")
        return [record.value for record in records]
    finally:
        source.close()


def refused(settings: KafkaSettings) -> str:
    """Why a source could not begin."""
    source = KafkaSource(settings, start_timeout_s=1.0)
    with pytest.raises(SourceError) as caught:
        source.seek(Position())
    source.close()
    return str(caught.value)


def poll_often(source: KafkaSource) -> None:
    for _ in range(20):
        source.poll(max_records=1, timeout_s=0.5)


@pytest.mark.broker
@pytest.mark.usefixtures("leaked_sockets")
class TestBroker:
    """What a real one accepts and refuses."""

    @pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
    def test_scram_over_tls_feeds_reads_commits_and_writes_letters(
        self, secured: SecuredBroker, mechanism: str
    ) -> None:
        """With the permissions that the README lists, and no others."""
        topic, dead = secured.new_topic(), secured.new_topic()
        secured.allow(USER, topic, "READ", "WRITE", "DESCRIBE")
        secured.allow(USER, dead, "READ", "WRITE", "DESCRIBE")
        secured.allow(USER, f"{GROUP}-{mechanism}", "READ", kind="GROUP")
        settings = secured.by_password(topic, sasl_mechanism=mechanism, group_id=f"{GROUP}-{mechanism}")
        assert feed(settings, topic, [b"a", b"b"]) == 2
        assert read(settings, 2) == [b"a", b"b"]
        assert secured.committed(settings.group_id) == {(topic, 0): (2, "note")}
        sink = KafkaDeadLetters(settings, dead)
        assert list(sink.recall(None)) == []
        sink.send(DeadLetter(Record(TopicPartition(topic, 0), 0, b"{", timestamp_ms=1), Reason.NOT_JSON, "no JSON"))
        sink.flush()
        sink.close()
        assert [message.value for message in secured.read_all(dead)] == [b"{"]

    def test_a_client_certificate_is_an_identity(self, secured: SecuredBroker) -> None:
        """Its subject is the user's name, and ACLs hold for it."""
        topic = secured.new_topic()
        certificate, key = secured.authority.issue("daemon")
        settings = secured.by_certificate(topic, ssl_certfile=certificate, ssl_keyfile=key)
        assert "must be open to this user" in refused(settings)
        secured.allow("CN=daemon", topic, "READ", "DESCRIBE")
        secured.produce(topic, [b"a"])
        assert read(settings, 1) == [b"a"]

    def test_a_certificate_that_is_being_replaced_is_waited_for(self, secured: SecuredBroker) -> None:
        """Half written, it keeps a daemon from coming back for a while, and does not end it."""
        topic = secured.new_topic()
        secured.allow("CN=rotated", topic, "READ", "DESCRIBE")
        secured.produce(topic, [b"a"])
        certificate, key = secured.authority.issue("rotated")
        whole = certificate.read_text()
        source = KafkaSource(secured.by_certificate(topic, ssl_certfile=certificate, ssl_keyfile=key))
        source.seek(Position())
        source._drop_consumer()  # as after an outage
        certificate.write_text(whole[:100])
        with capture_logs() as logs:
            assert source.poll(max_records=1, timeout_s=0.1) == ()
            certificate.write_text(whole)
            records = [record for _ in range(4) for record in source.poll(max_records=1, timeout_s=0.5)]
        source.close()
        assert [record.value for record in records] == [b"a"]
        assert "ssl.certfile and ssl.keyfile must be" in logs[0]["reason"]
        assert [entry["event"] for entry in logs] == [
            Event.SOURCE_UNREACHABLE,
            Event.SOURCE_REBUILT,
            Event.SOURCE_REACHABLE,
        ]

    def test_a_certificate_that_the_broker_does_not_trust_is_refused(
        self, secured: SecuredBroker, tmp_path: Path
    ) -> None:
        """None at all, and one of another authority."""
        words = "ssl.certfile and ssl.keyfile must be a certificate of ours that the broker trusts"
        assert words in refused(secured.by_certificate("any"))
        certificate, key = Authority(tmp_path / "other").issue("daemon")
        assert words in refused(secured.by_certificate("any", ssl_certfile=certificate, ssl_keyfile=key))

    def test_a_broker_that_we_do_not_trust_is_refused(self, secured: SecuredBroker, tmp_path: Path) -> None:
        """Another authority's, and ours under another name: nothing is sent to either."""
        words = "ssl.cafile must hold the authority that signed the broker's certificate"
        assert words in refused(secured.by_password("any", ssl_cafile=None))
        assert words in refused(secured.by_password("any", ssl_cafile=Authority(tmp_path / "other").certificate))
        _, _, port = secured.by_password("any").bootstrap_servers.rpartition(":")
        elsewhere = secured.by_password("any", bootstrap_servers=f"localhost:{port}")
        assert "bootstrap.servers must name the broker as its certificate does" in refused(elsewhere)

    @pytest.mark.parametrize(
        "wrong", [{"sasl_plain_password": "wrong"}, {"sasl_plain_username": "wrong"}, {"sasl_mechanism": "PLAIN"}]
    )
    def test_wrong_credentials_are_suspected(self, secured: SecuredBroker, wrong: dict[str, str]) -> None:
        """The client may lose what the broker said of them."""
        said = refused(secured.by_password("any", **wrong))
        assert "accepts connections and must speak SASL_SSL" in said
        assert "password" in said or "sasl.mechanism" in said

    def test_a_wrong_protocol_is_suspected(self, secured: SecuredBroker) -> None:
        """TLS to a plain listener, and plain to one of TLS."""
        words = "a wrong security.protocol"
        assert words in refused(secured.by_password("any", bootstrap_servers=secured.servers))
        behind_tls = secured.by_password("any").bootstrap_servers
        assert words in refused(secured.settings("any", bootstrap_servers=behind_tls))

    def test_a_missing_permission_is_named_at_once(self, secured: SecuredBroker) -> None:
        """Of seeing the topic, then of reading it, with the command; a group that may not be written is a warning."""
        topic = secured.new_topic()
        secured.produce(topic, [b"a"])
        settings = secured.by_password(topic, group_id="foreign")
        command = f"kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add --allow-principal User:{USER}"
        said = refused(settings)
        assert "must be open to this user, the broker does not show it" in said
        assert said.endswith(f"{command} --operation DESCRIBE --operation READ --topic {topic}")
        secured.allow(USER, topic, "DESCRIBE")
        said = refused(settings)
        assert "must be open to this user for READ" in said
        assert said.endswith(f"{command} --operation READ --topic {topic}")
        with pytest.raises(SourceError, match="for WRITE"):
            feed(settings, topic, [b"b"])
        secured.allow(USER, topic, "READ")
        assert read(settings, 1) == [b"a"]

    def test_a_permission_that_is_withdrawn_ends_the_run(self, secured: SecuredBroker) -> None:
        """Nothing is lost: a restart goes on once it is back."""
        topic = secured.new_topic()
        secured.allow(USER, topic, "READ", "DESCRIBE")
        source = KafkaSource(secured.by_password(topic))
        source.seek(Position())
        secured.withdraw(USER, topic)
        secured.produce(topic, [b"a"])
        with pytest.raises(SourceError, match=r"every source topic must be readable: .*needs READ and DESCRIBE"):
            poll_often(source)
        source.close()

    def test_dead_letters_that_could_not_be_written_stop_a_start(self, secured: SecuredBroker) -> None:
        """Not the first bad record, hours later."""
        topic = secured.new_topic()
        secured.allow(USER, topic, "DESCRIBE", "READ")
        with pytest.raises(DeadLetterError, match="must be open to this user for WRITE"):
            KafkaDeadLetters(secured.by_password("any"), topic)


def settings(**values: object) -> KafkaSettings:
    """Settings of a broker that nobody asks."""
    return KafkaSettings.model_validate({"bootstrap_servers": "broker:9093", "topics": ["t"], **values})


def with_password(path: Path) -> KafkaSettings:
    """Settings whose password lies in a file."""
    return settings(sasl_mechanism="SCRAM-SHA-512", sasl_plain_username="me", sasl_plain_password_file=path)


def test_the_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    """A trailing newline or a comment below is not part of it."""
    secret = tmp_path / "password"
    secret.write_text("corréct horse \r\nsecond line\n", encoding="utf-8")
    assert secure_options(with_password(secret))["sasl_plain_password"] == "corréct horse "  # noqa: S105 - not one


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    """It is the configuration that must change."""
    with pytest.raises(CredentialsError, match=r"sasl\.plain\.password\.file must be a readable text file: .*nowhere"):
        secure_options(with_password(tmp_path / "nowhere"))


def test_certificates_are_always_checked_against_the_host() -> None:
    """TLS without checking the host's name would be no protection."""
    options = secure_options(settings(security_protocol="SSL"))
    assert options.keys() == {"security_protocol", "ssl_context"}
    assert options["ssl_context"].check_hostname
    assert options["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert options["ssl_context"].minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    """Before anything is connected to."""
    authority = tmp_path / "authority.pem"
    if content is not None:
        authority.write_text(content)
    with pytest.raises(CredentialsError, match=r"ssl\.cafile must be a PEM file of authorities: .*authority\.pem"):
        secure_options(settings(security_protocol="SSL", ssl_cafile=authority))


def test_a_certificate_without_its_key_is_named(tmp_path: Path) -> None:
    """No key, another certificate's, and one behind a passphrase, which nobody is asked for."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("daemon")
    _, other = authority.issue("other")
    locked = authority.lock(key)
    words = r"ssl\.certfile and ssl\.keyfile must be a PEM certificate and its own PEM key, not encrypted: .*daemon"
    for wrong in (None, other, locked, tmp_path / "nowhere"):
        with pytest.raises(CredentialsError, match=words):
            secure_options(settings(security_protocol="SSL", ssl_certfile=certificate, ssl_keyfile=wrong))
    assert secure_options(settings(security_protocol="SSL", ssl_certfile=certificate, ssl_keyfile=key))


def test_a_key_without_its_certificate_is_refused() -> None:
    """It would be left out without a word."""
    with pytest.raises(ValidationError, match=r"ssl\.keyfile is the key of ssl\.certfile: set both"):
        settings(security_protocol="SSL", ssl_keyfile="key.pem")


LOST = "KafkaConnectionError: socket disconnected"


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ([LOST, LOST], f"{LOST}; a wrong security.protocol"),
        (
            [LOST, "[Error 58] SaslAuthenticationFailedError: no", LOST],
            "[Error 58] SaslAuthenticationFailedError: no; ",
        ),
        (
            [LOST, "[Error 33] UnsupportedSaslMechanismError"],
            "[Error 33] UnsupportedSaslMechanismError; sasl.mechanism",
        ),
        (["[Error 7] RequestTimedOutError: Request timed out after 95 ms"], "[Error 7] RequestTimedOutError"),
    ],
)
def test_what_tells_most_is_said(failures: list[str], said: str) -> None:
    """A connection that was closed without a word tells less than any other that failed for the same cause."""
    assert refusal(failures).startswith(said)
