"""Secrets appear in no output: no refused configuration, log, response, file or traceback."""

import base64
import re
import stat
import traceback
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from structlog.testing import capture_logs
from typer.testing import CliRunner

from connectors.kafka.security import secure_options
from connectors.kafka.source import KafkaSource
from connectors.open import open_dead_letters, open_source
from streamlearn.cli.main import app
from streamlearn.errors import ConfigError, CredentialsError, SourceError, StreamlearnError
from streamlearn.settings import Settings, fingerprint, load, section_type
from streamlearn.settings.values import merged
from streamlearn.stream.position import Position
from tests.broker import PASSWORD, Broker
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon

CANARY = "canary-7f3a-that-nobody-may-ever-see"
KAFKA = """
source:
  kafka:
    bootstrap.servers: 127.0.0.1:9
    topics: [a]
    security.protocol: SASL_PLAINTEXT
    sasl.mechanism: PLAIN
    sasl.plain.username: u
"""
WRONG = {
    "a colon": f"    sasl.plain.password: {CANARY}: x",
    "an alias": f"    sasl.plain.password: *{CANARY}",
    "a tag": f"    sasl.plain.password: !{CANARY} x",
    "a directive": f"    sasl.plain.password: %{CANARY}",
    "an open quote": f'    sasl.plain.password: "{CANARY}',
    "an escape": f'    sasl.plain.password: "\\y{CANARY}"',
    "a block": f"    sasl.plain.password: |{CANARY}",
    "a tabulator": f"\tsasl.plain.password: {CANARY}",
    "a control character": f"    sasl.plain.password: {CANARY}\x01",
    "twice": f"    sasl.plain.password: {CANARY}\n    sasl.plain.password: {CANARY}",
    "a mapping": f"    sasl.plain.password: {{{CANARY}: {CANARY}}}",
    "a list": f"    sasl.plain.password: [{CANARY}]",
    "a wrong name": f"    sasl.plain.pasword: {CANARY}",
    "another client's name": f"    sasl.jaas.config: {CANARY}",
    "a wrong neighbour": f"    sasl.plain.password: {CANARY}\n    max.poll.records: none",
    "a neighbour that does not fit": f"    sasl.plain.password: {CANARY}\n    ssl.cafile: [x]",
    "text instead of a section": f"serve: token_file {CANARY}",
    "text at the top": f"serve: 1\nsasl.plain.password {CANARY}",
}
ENVIRONMENT = {
    "STREAMLEARN_SOURCE__KAFKA": f'{{"sasl_plain_password": "{CANARY}"',
    "STREAMLEARN_SOURCE": CANARY,
    "STREAMLEARN_SOURCE__KAFKA__TOPICS": CANARY,
    "STREAMLEARN_SOURCE__KAFKA__SASL_PLAIN_PASWORD": CANARY,
    "STREAMLEARN_SOURCE__KAFKA__SASL_PLAIN_PASSWORD__X": CANARY,
}
READS = ("status", "regimes", "shifts", "snapshots", "history", "publication", "models", "eval", "route")
GET = ("/livez", "/readyz", "/metrics", "/", "/openapi.json", "/nowhere", *(f"/v1/{name}" for name in READS))


def shows(text: str | bytes, secret: str = CANARY) -> bool:
    """Whether the text contains the secret, as it is or in base64 at any of the three alignments."""
    data = text.encode() if isinstance(text, str) else text
    coded = [base64.b64encode(b"\x00" * start + secret.encode())[4:-4] for start in range(3)]
    return any(form in data for form in (secret.encode(), *coded))


def assert_silent(error: BaseException) -> None:
    assert not shows("".join(traceback.format_exception(error)))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def test_the_search_finds_a_secret_in_each_form() -> None:
    assert shows(f"x{CANARY}x")
    assert all(shows(base64.b64encode(f"{'u' * n}:{CANARY}:y".encode())) for n in range(3))
    assert not shows(CANARY[:-1])


def test_a_mistyped_secret_is_not_echoed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the message nor in its cause; the message still has the location."""
    for line in WRONG.values():
        config.write_text(line if line.startswith("serve") else KAFKA + line + "\n")
        with pytest.raises(ConfigError, match=r"line \d+|position \d+|[a-z]+: |expected a mapping") as caught:
            load(config)
        assert_silent(caught.value)
    config.write_text(KAFKA)
    for name, value in ENVIRONMENT.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=r"environment|source\.kafka") as caught:
                load(config)
        assert_silent(caught.value)


def test_settings_do_not_show_their_secrets(config: Path) -> None:
    """In any way of printing them, and in what a snapshot stores of them."""
    config.write_text(KAFKA + f"    sasl.plain.password: {CANARY}\n")
    settings = load(config)
    assert settings.source.kafka is not None
    assert settings.source.kafka.sasl_plain_password is not None
    assert settings.source.kafka.sasl_plain_password.get_secret_value() == CANARY
    for shown in (repr(settings), str(settings), settings.model_dump_json(), f"{settings.model_dump()}"):
        assert not shows(shown)
    assert not shows(orjson.dumps(fingerprint(settings)))


@pytest.mark.parametrize("command", [["check-config"], ["doctor", "--json"], ["run"]])
def test_no_command_shows_a_secret(
    command: list[str], config: Path, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a password, a token and an unreachable broker."""
    token = tmp_path / "token"
    token.write_text(CANARY)
    token.chmod(stat.S_IRUSR)
    config.write_text(
        KAFKA + f"backbone: {{model: {backbone}}}\nadapter: {{num_heads: 4}}\nserve: {{port: 0, token_file: {token}}}\n"
    )
    monkeypatch.setenv("STREAMLEARN_SOURCE__KAFKA__SASL_PLAIN_PASSWORD", CANARY)
    monkeypatch.setattr("streamlearn.cli.doctor.PATIENCE_S", 0.1)
    monkeypatch.setattr("streamlearn.daemon.build.open_source", partial(open_source, start_timeout_s=0.1))
    done = CliRunner().invoke(app, [*command, "--config", str(config)])
    assert done.output or done.exception
    assert not shows(done.output)
    if done.exception is not None:
        assert_silent(done.exception)


FORMS = (f"http://me:{CANARY}@[::1]:9/?token={CANARY}", f"me:{CANARY}@[::1]:9", f"[::1]:9?token={CANARY}")
"""User information and queries of URLs, with and without a scheme."""
NEEDED: dict[str, Any] = {
    "kafka": {"bootstrap.servers": "[::1]:9", "topics": ["a"], "security.protocol": "PLAINTEXT"},
    "jsonl": {"path": "records.jsonl"},
    "publish": {"folder": "published"},
    "vllm": {"replicas": ["http://[::1]:9"]},
    "hub": {"repository": "a/b", "token_file": "token"},
    "registry": {"url": "http://[::1]:9"},
    "mlflow": {"uri": "http://[::1]:9"},
}


def texts(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every setting that holds text, by its keys, and the type of its value in JSON."""
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        section, schema = section_type(annotation), str(TypeAdapter(annotation).json_schema())
        if section is not None:
            yield from texts(section, (*path, name))
        elif "'string'" in schema and "enum" not in schema:
            yield (*path, name), "array" if "array" in schema else "object" if "object" in schema else "string"


@pytest.mark.parametrize(
    ("path", "kind"), list(texts(Settings)), ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
def test_no_message_shows_the_credentials_of_a_url(
    path: tuple[str, ...], kind: str, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put into any setting, of a configuration that is refused, fails or works."""
    monkeypatch.setattr("streamlearn.cli.doctor.PATIENCE_S", 0.1)
    monkeypatch.setattr("streamlearn.daemon.build.open_source", partial(open_source, start_timeout_s=0.1))
    monkeypatch.setattr("streamlearn.daemon.build.open_dead_letters", partial(open_dead_letters, start_timeout_s=0.1))
    (tmp_path / "records.jsonl").write_bytes(b'{"prompt": "say", "completion": " it"}\n' * 3)
    source = "kafka" if "kafka" in path or path == ("dead_letters", "topic") else "jsonl"
    tree = {
        "source": {source: NEEDED[source]},
        "backbone": {"model": str(backbone), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "serve": {"port": 0},
        "log": {"style": "json", "level": "debug"},
    }
    for form in FORMS:
        values: Any = (
            [form] * 2
            if path[-1] == "sample_types"
            else {"string": form, "array": [form], "object": {form: form}}[kind]
        )
        for depth, name in reversed(list(enumerate(path))):
            values = {**(NEEDED.get(path[depth - 1], {}) if depth else {}), name: values}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(merged(tree, values)))
        outputs = []
        for command in ("check-config", "doctor", "run")[: 3 if form is FORMS[0] else 1]:
            done = CliRunner().invoke(app, [command, "--config", str(tmp_path / "config.yaml")])
            assert done.exception is None or isinstance(done.exception, SystemExit | StreamlearnError), done.exception
            outputs.append(f"{done.output} {done.exception}")
            if isinstance(done.exception, ConfigError):
                break  # the others refuse it likewise
        assert not [output for output in outputs if shows(output)]


SASL = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER", "allow_plaintext": True}
BESIDE: dict[str, dict[str, Any]] = {
    "sasl_plain_password_file": {**SASL, "sasl.mechanism": "SCRAM-SHA-256", "sasl.plain.username": "u"},
    "sasl_oauthbearer_client_secret_file": {
        **SASL,
        "sasl.oauthbearer.token.endpoint.url": "http://[::1]:9/",
        "sasl.oauthbearer.client.id": "c",
    },
    "sasl_oauthbearer_token_file": SASL,
    "ssl_keyfile": {"security.protocol": "SSL", "ssl.certfile": "cert.pem"},
    "tls_keyfile": {"tls_certfile": "cert.pem"},
    "password_file": {"username": "u"},
}
"""What a file with a secret needs in its section."""
SECRET_FILES = [path for path, _ in texts(Settings) if re.search(r"(password|secret|token|key)_?file$", path[-1])]


@pytest.mark.parametrize("path", SECRET_FILES, ids=".".join)
def test_every_file_with_a_secret_is_refused_if_others_may_read_it(
    path: tuple[str, ...], backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one rule."""
    monkeypatch.setattr("streamlearn.cli.doctor.PATIENCE_S", 0.1)
    assert len(SECRET_FILES) == 11
    (tmp_path / "records.jsonl").write_bytes(b'{"prompt": "say", "completion": " it"}\n' * 3)
    for name in ("secret", "cert.pem"):
        (tmp_path / name).write_text(CANARY)
    (tmp_path / "secret").chmod(0o644)
    values: Any = {**BESIDE.get(path[-1], {}), path[-1]: "secret"}
    for name in reversed(path[:-1]):
        values = {name: {**NEEDED.get(name, {}), **values}} if name in NEEDED else {name: values}
    source = "kafka" if "kafka" in path else "jsonl"
    tree = {"source": {source: NEEDED[source]}, "backbone": {"model": str(backbone)}, "adapter": {"num_heads": 4}}
    tree |= {"serve": {"port": 0}, "records": {"framing": "confluent"} if "registry" in path else {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(merged(tree, values)))
    if source == "kafka":
        kafka = load(tmp_path / "config.yaml").source.kafka
        assert kafka is not None
        with pytest.raises(
            CredentialsError, match=r"secret: expected a file readable by its owner only, found mode 644"
        ):
            secure_options(kafka)
    else:
        done = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "config.yaml"), "--json"])
        assert "secret: expected a file readable by its owner only, found mode 644" in done.output


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_of_a_failed_start_shows_no_secret(
    style: str, config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An unexpected error, with the settings in every frame and in its message."""
    config.write_text(KAFKA + f"serve: {{enabled: false}}\nlog: {{level: debug, style: {style}}}\n")
    monkeypatch.setenv("STREAMLEARN_SOURCE__KAFKA__SASL_PLAIN_PASSWORD", CANARY)

    def planted(settings: Settings, **_: Any) -> None:
        raise RuntimeError(f"planted, with {settings.source.kafka}")

    monkeypatch.setattr("streamlearn.cli.run.Components", planted)
    done = CliRunner().invoke(app, ["run", "--config", str(config)])
    assert done.exit_code == 1
    assert done.exception is not None
    assert_silent(done.exception)
    output = done.output + "".join(capfd.readouterr())
    assert "daemon_started" in output
    assert "planted, with bootstrap_servers=" in output
    assert not shows(output)


def files(folder: Path, *, but: Path | None = None) -> list[bytes]:
    """Name and content of every file in the folder."""
    paths = [path for path in folder.rglob("*") if path != but]
    return [str(path).encode() + (path.read_bytes() if path.is_file() else b"") for path in paths]


def test_a_running_daemon_never_shows_its_token(tmp_path: Path, backbone: Path, daemons: list[DaemonProcess]) -> None:
    """In every GET response without, with a wrong and with the right token, in the log and in every file."""
    stream = tmp_path / "stream.jsonl"
    stream.write_bytes(b"".join(b'{"prompt": "say %d", "completion": " %d"}\n' % (i, i) for i in range(24)) + b"{bad\n")
    daemon = ForkedDaemon(tmp_path / "run", small(backbone, {"jsonl": {"path": str(stream), "follow": True}}))
    daemon.state.mkdir()
    token = daemon.state / "http.token"
    token.write_text(CANARY)
    token.chmod(0o600)
    daemons.append(daemon)
    daemon.start()
    daemon.wait_until(lambda: daemon.journalled_step() >= 2, "two steps")
    port = daemon.events("http_started")[0]["port"]
    seen: list[bytes] = []
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {CANARY}"}):
            answers = [client.get(path, headers=given) for path in GET]
            headers = {"content-type": "application/json", **given}
            answers.append(client.post("/v1/snapshots", headers=headers))
            seen += [answer.content + str(answer.headers).encode() for answer in answers]
            assert answers[-1].status_code == (201 if CANARY in str(given) else 401)
    assert daemon.terminate() == 0
    assert b"streamlearn_" in b"".join(seen)
    assert b"step_taken" in daemon.log.read_bytes()
    assert not any(map(shows, [*seen, daemon.log.read_bytes(), *files(daemon.state, but=token)]))
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def small(backbone: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Settings of a small daemon that logs everything."""
    return {
        "source": source,
        "stream": {"max_tokens": 32, "batch_tokens": 128, "batch_records": 4},
        "backbone": {"model": str(backbone), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "snapshot": {"every_records": 8},
        "serve": {"port": 0},
        "log": {"style": "json", "level": "debug"},
    }


@pytest.mark.broker
@pytest.mark.usefixtures("leaked_sockets")
def test_a_password_that_works_is_shown_nowhere(
    broker: Broker, tmp_path: Path, backbone: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, lag and commits with SASL, and the output of `doctor`."""
    topic = broker.new_topic()
    broker.produce(topic, [b'{"text": "a"}'] * 3)
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    file.chmod(0o600)
    kafka = broker.sasl_settings(topic, password_file=file)
    source = KafkaSource(kafka, start_timeout_s=10.0)
    with capture_logs() as logs, closing(source):
        position = source.seek(Position())
        while not source.poll(max_records=10, timeout_s=0.5):
            assert source.lag(position)
        source.commit(position, "snapshot-1")
    assert len(logs) == 2
    assert not shows(orjson.dumps(logs, default=str), PASSWORD)
    given = small(backbone, {"kafka": kafka.model_dump(mode="json", exclude_none=True)})
    config.write_text(yaml.safe_dump(given))
    done = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert "3 offsets behind" in done.output
    assert not shows(done.output, PASSWORD)


@pytest.mark.broker
@pytest.mark.usefixtures("leaked_sockets")
def test_a_password_that_is_refused_is_shown_nowhere(broker: Broker, tmp_path: Path) -> None:
    topic = broker.new_topic()
    file = tmp_path / "password"
    file.write_text(CANARY)
    file.chmod(0o600)
    source = KafkaSource(broker.sasl_settings(topic, password_file=file), start_timeout_s=2.0)
    with pytest.raises(SourceError) as caught:
        source.seek(Position())
    source.close()
    assert_silent(caught.value)
