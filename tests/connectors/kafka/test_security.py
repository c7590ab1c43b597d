"""Against a broker configured as in production: what is accepted, what is refused, and with which message."""

import importlib
import json
import os
import ssl
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from kafka.net.sasl import get_sasl_mechanism
from pydantic import ValidationError
from structlog.testing import capture_logs

from connectors.kafka.clients import explain_failures
from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.kafka.feed import feed
from connectors.kafka.security import secure_options
from connectors.kafka.source import KafkaSource
from connectors.rows import FeedRecord, Place
from streamlearn.errors import CredentialsError, DeadLetterError, Reason, SourceError
from streamlearn.events import Event
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import Position, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter
from tests.broker import USER, Broker, needed_kafka, running
from tests.connectors.kafka.secured import Authority, SecuredBroker

HERE = Place(Path("rows.jsonl"), "line", 1)
GROUP = "streamlearn"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    yield from running(SecuredBroker(needed_kafka(), tmp_path_factory.mktemp("secured")))


def read(settings: KafkaSettings, count: int) -> list[bytes | None]:
    """Read the first records of a topic through a source, and commit after them."""
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


def refusal(settings: KafkaSettings) -> str:
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
    """What a real broker accepts and refuses."""

    def test_scram_over_tls_feeds_reads_commits_and_writes_dead_letters(self, secured: SecuredBroker) -> None:
        """With only the permissions that the documentation lists."""
        topic, dead = secured.new_topic(), secured.new_topic()
        secured.allow(USER, topic, "READ", "WRITE", "DESCRIBE")
        secured.allow(USER, dead, "READ", "WRITE", "DESCRIBE")
        secured.allow(USER, GROUP, "READ", kind="GROUP")
        settings = secured.by_password(topic, group_id=GROUP)
        assert feed(settings, topic, [FeedRecord(b"a", HERE), FeedRecord(b"b", HERE)]).acknowledged == 2
        assert read(settings, 2) == [b"a", b"b"]
        assert secured.committed(settings.group_id) == {(topic, 0): (2, "note")}
        sink = KafkaDeadLetters(settings, dead)
        assert list(sink.recall(None)) == []
        sink.send(DeadLetter(Record(TopicPartition(topic, 0), 0, b"{", timestamp_ms=1), Reason.NOT_JSON, "no JSON"))
        sink.flush()
        sink.close()
        assert [message.value for message in secured.read_all(dead)] == [b"{"]

    def test_a_client_certificate_authenticates(self, secured: SecuredBroker) -> None:
        """Its subject is the user name, and ACLs apply to it."""
        topic = secured.new_topic()
        certificate, key = secured.authority.issue("daemon")
        settings = secured.by_certificate(topic, ssl_certfile=certificate, ssl_keyfile=key)
        assert "must be visible to this user" in refusal(settings)
        secured.allow("CN=daemon", topic, "READ", "DESCRIBE")
        secured.produce(topic, [b"a"])
        assert read(settings, 1) == [b"a"]

    def test_a_certificate_that_is_being_replaced_is_retried(self, secured: SecuredBroker) -> None:
        """A half-written certificate delays a reconnection and does not end the daemon."""
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
        """No certificate, and one signed by another CA."""
        advice = "ssl.certfile and ssl.keyfile must be a client certificate that the broker trusts"
        assert advice in refusal(secured.by_certificate("any"))
        certificate, key = Authority(tmp_path / "other").issue("daemon")
        assert advice in refusal(secured.by_certificate("any", ssl_certfile=certificate, ssl_keyfile=key))

    def test_a_broker_that_we_do_not_trust_is_refused(self, secured: SecuredBroker, tmp_path: Path) -> None:
        """One signed by another CA, and ours under another host name: nothing is sent to either."""
        advice = "the broker's certificate must be signed by a CA in ssl.cafile"
        assert advice in refusal(secured.by_password("any", ssl_cafile=None))
        assert advice in refusal(secured.by_password("any", ssl_cafile=Authority(tmp_path / "other").certificate))
        _, _, port = secured.by_password("any").bootstrap_servers.rpartition(":")
        elsewhere = secured.by_password("any", bootstrap_servers=f"localhost:{port}")
        assert "the broker's certificate must match the host names in bootstrap.servers" in refusal(elsewhere)

    @pytest.mark.parametrize("wrong", [{"sasl_plain_password": "wrong"}, {"sasl_mechanism": "PLAIN"}])
    def test_the_message_suspects_wrong_credentials(self, secured: SecuredBroker, wrong: dict[str, str]) -> None:
        """kafka-python may lose the broker's reason."""
        message = refusal(secured.by_password("any", **wrong))
        assert "accepts TCP connections but no SASL_SSL connection succeeded" in message
        assert "password" in message or "sasl.mechanism" in message

    def test_the_message_suspects_a_wrong_protocol(self, secured: SecuredBroker) -> None:
        """TLS to a plaintext listener, and plaintext to a TLS listener."""
        advice = "a wrong security.protocol"
        assert advice in refusal(secured.by_password("any", bootstrap_servers=secured.servers))
        tls_listener = secured.by_password("any").bootstrap_servers
        assert advice in refusal(secured.settings("any", bootstrap_servers=tls_listener))

    def test_a_missing_permission_is_named_at_once(self, secured: SecuredBroker) -> None:
        """DESCRIBE, then READ, each with the command that grants it; READ on the group is only a warning."""
        topic = secured.new_topic()
        secured.produce(topic, [b"a"])
        settings = secured.by_password(topic, group_id="foreign")
        command = f"kafka-acls.sh --bootstrap-server {settings.bootstrap_servers} --add --allow-principal User:{USER}"
        message = refusal(settings)
        assert "must be visible to this user, found no DESCRIBE permission" in message
        assert message.endswith(f"{command} --operation DESCRIBE --operation READ --topic {topic}")
        secured.allow(USER, topic, "DESCRIBE")
        message = refusal(settings)
        assert "must allow READ to this user, found no such permission" in message
        assert message.endswith(f"{command} --operation READ --topic {topic}")
        with pytest.raises(SourceError, match="must allow WRITE to this user"):
            feed(settings, topic, [FeedRecord(b"b", HERE)])
        secured.allow(USER, topic, "READ")
        assert read(settings, 1) == [b"a"]

    def test_a_revoked_permission_ends_the_run(self, secured: SecuredBroker) -> None:
        """Nothing is lost: a restart continues once it is granted again."""
        topic = secured.new_topic()
        secured.allow(USER, topic, "READ", "DESCRIBE")
        source = KafkaSource(secured.by_password(topic))
        source.seek(Position())
        secured.revoke(USER, topic)
        secured.produce(topic, [b"a"])
        with pytest.raises(
            SourceError, match=r"every source topic must be readable: .*grant the user READ and DESCRIBE"
        ):
            poll_often(source)
        source.close()

    def test_an_unwritable_dead_letter_topic_is_an_error_at_the_start(self, secured: SecuredBroker) -> None:
        """Not only at the first bad record, hours later."""
        topic = secured.new_topic()
        secured.allow(USER, topic, "DESCRIBE", "READ")
        with pytest.raises(DeadLetterError, match="must allow WRITE to this user"):
            KafkaDeadLetters(secured.by_password("any"), topic)


def settings(**values: object) -> KafkaSettings:
    return KafkaSettings.model_validate({"bootstrap_servers": "broker:9093", "topics": ["t"], **values})


def with_password(path: Path) -> KafkaSettings:
    return settings(sasl_mechanism="SCRAM-SHA-512", sasl_plain_username="me", sasl_plain_password_file=path)


def test_the_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    """A trailing newline or a comment below is not part of it."""
    secret = tmp_path / "password"
    secret.write_text("corréct horse \r\nsecond line\n", encoding="utf-8")
    secret.chmod(0o600)
    assert secure_options(with_password(secret))["sasl_plain_password"] == "corréct horse "  # noqa: S105 - not a secret


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    """The configuration must be changed."""
    with pytest.raises(CredentialsError, match=r"sasl\.plain\.password\.file: .*nowhere: the secret cannot be read"):
        secure_options(with_password(tmp_path / "nowhere"))


def test_certificates_are_always_checked_against_the_host() -> None:
    """TLS without a check of the host name would not protect."""
    options = secure_options(settings(security_protocol="SSL"))
    assert options.keys() == {"security_protocol", "ssl_context"}
    assert options["ssl_context"].check_hostname
    assert options["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert options["ssl_context"].minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_unreadable_ca_file_is_named(tmp_path: Path, content: str | None) -> None:
    """Before any connection is made."""
    authority = tmp_path / "authority.pem"
    if content is not None:
        authority.write_text(content)
    with pytest.raises(CredentialsError, match=r"ssl\.cafile must be a PEM file of CA certificates: .*authority\.pem"):
        secure_options(settings(security_protocol="SSL", ssl_cafile=authority))


def test_a_certificate_without_its_key_is_named(tmp_path: Path) -> None:
    """No key, another certificate's key, and an encrypted key; there is no prompt for its passphrase."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("daemon")
    _, other = authority.issue("other")
    encrypted = authority.encrypt(key)
    message = r"ssl\.certfile and ssl\.keyfile must be a PEM certificate and its unencrypted PEM key: .*daemon"
    for wrong in (None, other, encrypted, tmp_path / "nowhere"):
        with pytest.raises(CredentialsError, match=message):
            secure_options(settings(security_protocol="SSL", ssl_certfile=certificate, ssl_keyfile=wrong))
    assert secure_options(settings(security_protocol="SSL", ssl_certfile=certificate, ssl_keyfile=key))


def test_a_key_without_its_certificate_is_refused() -> None:
    """It would be ignored silently."""
    with pytest.raises(ValidationError, match=r"ssl\.keyfile is the key of ssl\.certfile: set both"):
        settings(security_protocol="SSL", ssl_keyfile="key.pem")


LOST = "KafkaConnectionError: socket disconnected"


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([LOST, LOST], f"{LOST}; a wrong security.protocol"),
        (
            [LOST, "[Error 58] SaslAuthenticationFailedError: no", LOST],
            "[Error 58] SaslAuthenticationFailedError: no; ",
        ),
        (
            [LOST, "[Error 33] UnsupportedSaslMechanismError"],
            "[Error 33] UnsupportedSaslMechanismError; set sasl.mechanism",
        ),
        (["[Error 7] RequestTimedOutError: Request timed out after 95 ms"], "[Error 7] RequestTimedOutError"),
    ],
)
def test_the_most_specific_failure_is_reported(failures: list[str], message: str) -> None:
    """A connection closed without a reason is less specific than any other failure."""
    assert explain_failures(failures).startswith(message)


MSK_HOST = "b-1.cluster.kafka.eu-central-1.amazonaws.com"
MSK = {"security_protocol": "SASL_SSL", "sasl_mechanism": "AWS_MSK_IAM", "bootstrap_servers": f"{MSK_HOST}:9098"}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An environment without AWS credentials; the package botocore."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return pytest.importorskip("botocore")


def test_aws_credentials_and_region_are_required(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment's usual places; each is named before a connection is made."""
    with pytest.raises(CredentialsError, match=r"AWS_MSK_IAM needs AWS credentials, found none: set AWS_ACCESS_KEY_ID"):
        secure_options(settings(**MSK))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(CredentialsError, match=r"AWS_MSK_IAM needs the region .* set AWS_DEFAULT_REGION"):
        secure_options(settings(**MSK))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert secure_options(settings(**MSK))["sasl_mechanism"] == "AWS_MSK_IAM"


def test_a_connection_to_msk_is_signed_as_aws_documents(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of aws-msk-iam-auth, with the signature that botocore computes. It was never tried on AWS."""
    for name, value in {
        "ACCESS_KEY_ID": "AKIDEXAMPLE",
        "SECRET_ACCESS_KEY": "se/cret",
        "SESSION_TOKEN": "to+ken",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    options = secure_options(settings(**MSK))
    message = json.loads(get_sasl_mechanism(options["sasl_mechanism"])(host=MSK_HOST, **options).auth_bytes())
    at = datetime.strptime(message["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda **_: at.replace(tzinfo=None))
    session = importlib.import_module("botocore.session").Session()
    auth = importlib.import_module("botocore.auth").SigV4QueryAuth(
        session.get_credentials(), "kafka-cluster", "eu-central-1", expires=900
    )
    request = importlib.import_module("botocore.awsrequest").AWSRequest(
        "GET", f"https://{MSK_HOST}/?Action=kafka-cluster%3AConnect"
    )
    auth.add_auth(request)
    signed = dict(parse_qsl(urlsplit(request.url).query))
    assert message["x-amz-signature"] == signed["X-Amz-Signature"]
    assert {key for key in message if not key.startswith("x-amz")} == {"version", "host", "user-agent", "action"}
    assert (message["version"], message["action"]) == ("2020_10_22", "kafka-cluster:Connect")


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("AWS_MSK_IAM", r"needs the package botocore\.session, .*pip install 'streamlearn\[msk\]'"),
        ("GSSAPI", r"needs the package gssapi, .*pip install 'streamlearn\[kerberos\]'"),
    ],
)
def test_a_missing_package_is_named(mechanism: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("botocore.session", "gssapi"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CredentialsError, match=message):
        secure_options(settings(**{**MSK, "sasl_mechanism": mechanism}))
