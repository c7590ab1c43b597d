"""A configuration is loaded, or refused with the key, what was found and what to write instead."""

import os
import shutil
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter

from streamlearn.errors import ConfigError
from streamlearn.settings import KafkaSettings, Settings, StreamSettings, digest, fingerprint, load, section_type
from streamlearn.settings.values import section_at

LOCAL = {"bootstrap.servers": "localhost:9092", "topics": ["t"], "security.protocol": "PLAINTEXT"}
SASL = {
    "bootstrap.servers": "broker.example:9093",
    "topics": ["t"],
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.plain.username": "learner",
    "sasl.plain.password": "canary-3141",
}


def write(folder: Path, tree: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return file


def kafka(**changed: Any) -> dict[str, Any]:
    """A minimal configuration for a local broker; `_` in a name becomes Kafka's dot."""
    return {"source": {"kafka": LOCAL | {name.replace("_", "."): value for name, value in changed.items()}}}


def jsonl(**sections: Any) -> dict[str, Any]:
    return {"source": {"jsonl": {"path": "data.jsonl"}}, **sections}


def test_a_minimal_file_has_defaults_for_the_rest(tmp_path: Path) -> None:
    """Only the source is required."""
    settings = load(write(tmp_path, jsonl()))
    assert settings.stream == StreamSettings()
    assert settings.source.kafka is None
    with pytest.raises(Exception, match="frozen"):
        settings.stream.max_tokens = 3  # type: ignore[misc]


REFUSED: dict[str, tuple[Any, str]] = {
    "a misspelt section": (jsonl(straem={}), "straem: unknown key, did you mean stream?"),
    "a misspelt key": (jsonl(stream={"max_tokn": 9}), "stream.max_tokn: unknown key, did you mean stream.max_tokens?"),
    "a misspelt Kafka key": (
        {"source": {"kafka": LOCAL | {"bootstrap.sevrers": "a:1"}}},
        "source.kafka.bootstrap_sevrers: unknown key, did you mean source.kafka.bootstrap_servers?",
    ),
    "a key like no other": (jsonl(log={"xyzzy": 1}), "log.xyzzy: unknown key, known keys: level, style"),
    "no source": ({}, "source: required, but missing"),
    "an empty source": ({"source": {}}, "exactly one of kafka and jsonl must be set, found none"),
    "two sources": ({"source": {"kafka": LOCAL, "jsonl": {"path": "a"}}}, "found kafka and jsonl"),
    "no topics": (kafka(topics=[]), "source.kafka: either topics or topics.pattern must be set, found neither"),
    "a record larger than a batch": (jsonl(stream={"max_tokens": 4096}), "max_tokens 4096 exceeds batch_tokens 2048"),
    "one token": (jsonl(stream={"max_tokens": 1}), "max_tokens must be at least 2"),
    "an open endpoint": (jsonl(serve={"host": "0.0.0.0"}), "not a loopback address"),  # noqa: S104 - must be refused
    "gzip followed": ({"source": {"jsonl": {"path": "a.gz", "follow": True}}}, "gzip and cannot be followed"),
    "two dead letter sinks": (jsonl(dead_letters={"topic": "a", "file": "b"}), "topic and file exclude each other"),
    "a dead letter topic without Kafka": (jsonl(dead_letters={"topic": "a"}), "dead_letters.topic needs source.kafka"),
    "dead letters in the source": (jsonl(dead_letters={"file": "data.jsonl"}), "must not be written to source.jsonl"),
    "a dead letter topic that is read": (kafka() | {"dead_letters": {"topic": "t"}}, "must not be one of .* found t: "),
    "auto commit": (kafka(enable_auto_commit=False), "enable.auto.commit is not supported: offsets are committed"),
    "auto offset reset": (kafka(auto_offset_reset="latest"), "auto.offset.reset is not supported: use offset.start"),
    "a group protocol": (kafka(group_protocol="consumer"), "group.protocol is not supported"),
    "JAAS": (kafka(sasl_jaas_config="x"), "sasl.jaas.config is not supported: use sasl.mechanism"),
    "a trust store": (kafka(ssl_truststore_location="x"), "ssl.truststore.location is not supported: use ssl.cafile"),
    "a key store": (kafka(ssl_keystore_location="x"), "ssl.keystore.location is not supported: use ssl.certfile"),
    "a deserializer": (kafka(value_deserializer="x"), "value.deserializer is not supported"),
    "plain text to another host": (kafka(bootstrap_servers="broker:9092"), "broker:9092 is not on this machine"),
    "plain text to one other host": (kafka(bootstrap_servers="localhost:1, 10.0.0.7:2"), "is not on this machine"),
    "a port that is none": (kafka(bootstrap_servers="localhost:99999"), "from 1 to 65535, found localhost:99999"),
    "no broker": (kafka(bootstrap_servers=" , "), "expected host:port of a broker, found none"),
    "a password in clear": (
        {"source": {"kafka": SASL | {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN",
                                     "allow_plaintext": True}}},
        "sends the password in clear text",
    ),
    "SASL without a user": ({"source": {"kafka": {"bootstrap.servers": "b:1", "topics": ["t"]}}}, "SASL_SSL needs"),
    "a list": ("- a\n", "expected a mapping of sections, found list"),
    "nothing": ("", "expected a mapping of sections, found NoneType"),
    "not valid YAML": ("a: [", "not valid YAML"),
    "deep nesting": ("a: " + "[" * 5000, "not valid YAML: nested too deeply"),
    "a Python object": ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("tree", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_with_key_and_remedy(tmp_path: Path, tree: Any, words: str) -> None:
    """Every fault is a ConfigError that starts with the file and names what to change."""
    file = write(tmp_path, tree)
    with pytest.raises(ConfigError, match=words) as refused:
        load(file)
    assert str(refused.value).startswith(str(file))
    assert refused.value.exit_code == 78


def test_names_every_fault_at_once(tmp_path: Path) -> None:
    """One line per fault."""
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, jsonl(stream={"max_tokn": 9, "batch_records": 0}, lgo={})))
    assert len(str(refused.value).splitlines()) == 3


def test_the_environment_overrides_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values of the same section keep what the file says."""
    monkeypatch.setenv("STREAMLEARN_STREAM__MAX_TOKENS", "77")
    monkeypatch.setenv("STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:7")
    monkeypatch.setenv("STREAMLEARN_SEED", "5")
    settings = load(write(tmp_path, kafka() | {"stream": {"batch_records": 3}}))
    assert (settings.stream.max_tokens, settings.stream.batch_records, settings.seed) == (77, 3, 5)
    assert settings.source.kafka is not None
    assert settings.source.kafka.bootstrap_servers == "127.0.0.1:7"
    assert settings.source.kafka.topics == ("t",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("STREAMLEARN_STREAM__MAX_TOKN", "did you mean STREAMLEARN_STREAM__MAX_TOKENS?"),
        ("STREAMLEARN_STRAEM__MAX_TOKENS", "did you mean STREAMLEARN_STREAM__MAX_TOKENS?"),
        ("STREAMLEARN_SOURCE__KAFKA__TOPIC", "did you mean STREAMLEARN_SOURCE__KAFKA__TOPICS?"),
        ("STREAMLEARN_LOG_LEVEL", "did you mean STREAMLEARN_LOG__LEVEL?"),
        ("STREAMLEARN_SERVE_PORT", "did you mean STREAMLEARN_SERVE__PORT?"),
        ("STREAMLEARN_STAET", "did you mean STREAMLEARN_STATE?"),
        ("STREAMLEARN_KAFKA__TOPICS", "did you mean STREAMLEARN_SOURCE__KAFKA__TOPICS?"),
        ("STREAMLEARN_SERVE__SERVICE_PORT", "did you mean STREAMLEARN_SERVE__"),
        ("streamlearn_log_level", "did you mean STREAMLEARN_LOG__LEVEL?"),
        ("STREAMLEARN_LOG__XYZZY", "known keys: level, style"),
        ("STREAMLEARN_SEED__DEEPER", "STREAMLEARN_SEED__DEEPER: unknown environment variable"),
        ("STREAMLEARN_", "STREAMLEARN_: unknown environment variable"),
    ],
)
def test_an_unknown_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    """A typo in the environment is refused like one in the file."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, jsonl()))
    assert words in str(refused.value)


def test_kafka_keys_may_have_dots_or_underscores(tmp_path: Path) -> None:
    """Both spellings are the same key; topics may be one comma-separated string."""
    dotted = load(write(tmp_path, kafka(group_id="g", topics="t, u,", max_poll_records=7))).source.kafka
    assert dotted is not None
    assert (dotted.group_id, dotted.topics, dotted.max_poll_records) == ("g", ("t", "u"), 7)
    plain = {"bootstrap_servers": "[::1]:9092, LOCALHOST:9093,", "topics": ["t"], "security_protocol": "PLAINTEXT"}
    assert load(write(tmp_path, {"source": {"kafka": plain}})).source.kafka == KafkaSettings(
        bootstrap_servers="[::1]:9092,LOCALHOST:9093", topics=("t",), security_protocol="PLAINTEXT"
    )


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory does not matter; absolute paths and ~ keep their meaning."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/learner")
    canaries = {"canaries": ["general.jsonl", "~/safety.jsonl"]}
    changes = {"state": "/var/lib/streamlearn", "dead_letters": {"file": "~/dead.jsonl"}, "holdout": canaries}
    settings = load(write(tmp_path, jsonl(**changes)))
    assert settings.holdout.canaries == (tmp_path / "general.jsonl", Path("/home/learner/safety.jsonl"))
    assert settings.source.jsonl is not None
    assert settings.source.jsonl.path == tmp_path / "data.jsonl"
    assert settings.state == Path("/var/lib/streamlearn")
    assert settings.dead_letters.file == Path("/home/learner/dead.jsonl")
    assert load(write(tmp_path, jsonl())).state == tmp_path / "state"


@pytest.mark.parametrize("how", [repr, str, lambda s: s.model_dump_json(), lambda s: repr(s.model_dump())])
def test_a_password_is_never_shown(tmp_path: Path, how: Any) -> None:
    settings = load(write(tmp_path, {"source": {"kafka": SASL}}))
    assert settings.source.kafka is not None
    assert settings.source.kafka.sasl_plain_password is not None
    assert settings.source.kafka.sasl_plain_password.get_secret_value() == "canary-3141"
    assert "canary" not in how(settings)


@pytest.mark.parametrize(
    "change",
    [
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
        {"sasl.plain.username": None},
        {"sasl.mechanism": "canary"},
        {"sasl.plain.password": ["canary-3141"]},
        {"sasl.plain.pasword": "canary-3141"},
        {"sasl.jaas.config": "canary-3141"},
    ],
)
def test_a_message_never_contains_a_password(tmp_path: Path, change: dict[str, Any]) -> None:
    """Whatever else is wrong in the section."""
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, {"source": {"kafka": SASL | change}}))
    assert "canary-3141" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "alters"),
    [
        ({"seed": 1}, True),
        ({"stream": {"batch_records": 2}}, True),
        ({"stream": {"linger_s": None}}, False),
        ({"backbone": {"dtype": "float32"}}, True),
        ({"backbone": {"quantization": "nf4"}}, True),
        ({"adapter": {"rank": 3}}, True),
        ({"learner": {"lr": 0.5}}, True),
        ({"learner": {"activation_checkpointing": True}}, False),
        ({"holdout": {"canaries": ["general.jsonl"]}}, False),
        ({"state": "elsewhere"}, False),
        ({"source": {"jsonl": {"path": "other.jsonl"}}}, False),
        ({"dead_letters": {"file": "dead.jsonl"}}, False),
        ({"snapshot": {"keep": 9}}, False),
        ({"serve": {"enabled": False}}, False),
        ({"log": {"level": "debug"}}, False),
    ],
)
def test_the_fingerprint_holds_what_alters_results(tmp_path: Path, change: dict[str, Any], alters: bool) -> None:
    """A snapshot resumes with another log level or folder, but not with another learning rate."""
    base, other = (load(write(tmp_path, tree)) for tree in (jsonl(), jsonl() | change))
    assert (digest(fingerprint(base)) != digest(fingerprint(other))) is alters


SERVICES = ("STREAMLEARN", "STREAMLEARN_GATEWAY", "STREAMLEARN_SERVE", "STREAMLEARN_PUBLISH_VLLM")
LINKS = {
    "SERVICE_HOST": "10.96.14.3",
    "SERVICE_PORT": "8083",
    "SERVICE_PORT_METRICS": "8083",
    "PORT": "tcp://10.96.14.3:8083",
    **{f"PORT_8083_{protocol}": f"{protocol.lower()}://10.96.14.3:8083" for protocol in ("TCP", "UDP", "SCTP")},
    **{f"PORT_8083_TCP_{part}": "8083" for part in ("PROTO", "PORT", "ADDR")},
}
"""What a kubelet sets for each Service of a pod's namespace, after its name."""


@pytest.mark.parametrize(
    "variables",
    [
        *({f"{service}_{name}": value for name, value in LINKS.items()} for service in SERVICES),
        *({f"STREAMLEARN_{name}": "x"} for name in ("PROCESSES", "IMAGE", "VERSION", "HOME", "URL", "A__B")),
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_a_variable_of_others_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Kubernetes, Docker and operators use the prefix too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load(write(tmp_path, jsonl())).serve.port == 8083


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("STREAM__LINGER_S", "null", ("stream", "linger_s", None)),
        ("STREAM__LINGER_S", "2.5", ("stream", "linger_s", 2.5)),
        ("STREAM", '{"linger_s": null}', ("stream", "linger_s", None)),
        ("STREAM", "{linger.s: 3}", ("stream", "linger_s", 3.0)),
        ("ADAPTER__TARGET_MODULES", "[up_proj, down_proj]", ("adapter", "target_modules", ("up_proj", "down_proj"))),
        ("RECORDS__PROMPT", "{title}: {body}", ("records", "prompt", "{title}: {body}")),
        ("RECORDS__ROLES", "{customer: user}", ("records", "roles", {"customer": "user"})),
        ("SERVE__ENABLED", "no", ("serve", "enabled", False)),
        ("PUBLISH", "null", ("publish", None)),
    ],
)
def test_a_variable_has_the_forms_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, wanted: tuple[Any, ...]
) -> None:
    """Also null, where the setting may be null."""
    monkeypatch.setenv(f"STREAMLEARN_{name}", value)
    found: Any = load(write(tmp_path, jsonl(publish={"folder": "p"}, records={"completion": "a"})))
    *path, expected = wanted
    for key in path:
        found = getattr(found, key)
    assert found == expected


@pytest.mark.parametrize("password", ["123456", "0123", "true", "null", '{"a": 1}', "[a]", "1e5", " x "])
def test_a_password_in_the_environment_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("STREAMLEARN_SOURCE__KAFKA__SASL_PLAIN_PASSWORD", password)
    settings = load(write(tmp_path, {"source": {"kafka": SASL}}))
    assert settings.source.kafka is not None
    assert settings.source.kafka.sasl_plain_password is not None
    assert settings.source.kafka.sasl_plain_password.get_secret_value() == password


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SEED", "x", "environment variable STREAMLEARN_SEED: seed: expected a whole number, found 'x'"),
        ("STREAM", "{max_tokn: 3}", "environment variable STREAMLEARN_STREAM: stream.max_tokn: unknown key, did you"),
        ("STREAM", "[", "environment variable STREAMLEARN_STREAM: not valid YAML: "),
        ("LOG", "debug", "environment variable STREAMLEARN_LOG: log: expected a mapping of keys to values"),
        (
            "ADAPTER__TARGET_MODULES",
            "up",
            "environment variable STREAMLEARN_ADAPTER__TARGET_MODULES: adapter.target_mod",
        ),
        (
            "STREAM__MAX_TOKENS",
            "4096",
            "config.yaml with environment variable STREAMLEARN_STREAM__MAX_TOKENS: stream: max_tokens 4096 exceeds",
        ),
    ],
)
def test_a_wrong_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """And not the file; where several values do not fit together, both are."""
    monkeypatch.setenv(f"STREAMLEARN_{name}", value)
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, jsonl()))
    assert str(refused.value).removeprefix(f"{tmp_path}/").startswith(message)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("source: {kafka: {bootstrap.servers: b:1, topics: [no]}}", "topics: expected text, found false: put it in"),
        ("seed:\nsource: {jsonl: {path: a}}", "seed: expected a whole number, found null"),
        ("state: 2026-01-01\nsource: {jsonl: {path: a}}", "state: expected a path, found 2026-01-01: put it in quotes"),
        ("state: ''\nsource: {jsonl: {path: a}}", "state: expected a path, found an empty text"),
        ("source: {jsonl: {path: ''}}", "source.jsonl.path: expected a path, found an empty text"),
        ("learner: {lr: true}\nsource: {jsonl: {path: a}}", "learner.lr: expected a number, found true"),
        ("seed: no\nsource: {jsonl: {path: a}}", "seed: expected a number, found false"),
        ("stream: 3\nsource: {jsonl: {path: a}}", "stream: expected a mapping of keys to values"),
        ("adapter: {target_modules: up}\nsource: {jsonl: {path: a}}", "expected a list such as [a, b], found 'up'"),
        ("learner: {betas: [0.9]}\nsource: {jsonl: {path: a}}", "learner.betas: expected more items"),
        ("learner: {betas: [0, 0, 0]}\nsource: {jsonl: {path: a}}", "learner.betas: expected at most 2 items"),
        ("serve: {port: 99999}\nsource: {jsonl: {path: a}}", "serve.port: expected at most 65535, found 99999"),
        ("log: {level: loud}\nsource: {jsonl: {path: a}}", "expected 'debug', 'info', 'warning' or 'error', found"),
        ("publish: {folder: a, vllm: {replicas: []}}\nsource: {jsonl: {path: a}}", "expected at least one item"),
        ("publish: {folder: a, vllm: {replicas: [3]}}\nsource: {jsonl: {path: a}}", "replicas: expected text, found 3"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_in_words(tmp_path: Path, tree: str, message: str) -> None:
    """Without the names of Python's and pydantic's types."""
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, tree))
    [line] = str(refused.value).splitlines()
    assert message in line
    assert not any(word in line for word in ("instance of", "<class", "valid", "Input", "tuple"))


def test_an_unquoted_password_is_told_to_be_quoted(tmp_path: Path) -> None:
    """And not shown."""
    with pytest.raises(ConfigError, match=r"sasl_plain_password: expected text: put it in quotes$") as refused:
        load(write(tmp_path, {"source": {"kafka": SASL | {"sasl.plain.password": 12345678}}}))
    assert "1234" not in str(refused.value)


def test_merge_keys_work_as_in_every_yaml_file(tmp_path: Path) -> None:
    """Own keys replace merged ones, however they are spelled; keys that begin with x- hold what is merged."""
    settings = load(
        write(
            tmp_path,
            "x-often: &often {every.records: 200, keep: 9}\nx-two: &two {<<: *often, keep: 8}\n"
            "source: {jsonl: {path: a}}\nsnapshot: {<<: [*two, *often], every_s: 7, every_records: 300}\n"
            "learner:\n  <<: {lr: 0.001}\n",
        )
    )
    assert (settings.snapshot.every_records, settings.snapshot.keep, settings.snapshot.every_s) == (300, 8, 7)
    assert settings.learner.lr == 0.001
    with pytest.raises(ConfigError, match="duplicate key keep"):
        load(write(tmp_path, "snapshot: {<<: {keep: 3}, keep: 4, keep: 5}"))


def sections(model: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every section of the settings, by its keys."""
    inner = {name: section_type(field.annotation) for name, field in model.model_fields.items()}
    own = [(*path, name) for name, section in inner.items() if section]
    return own + [deeper for name, section in inner.items() if section for deeper in sections(section, (*path, name))]


@pytest.mark.parametrize("path", sections(Settings), ids=".".join)
def test_a_section_without_keys_is_absent(tmp_path: Path, path: tuple[str, ...]) -> None:
    """YAML reads it as null where all keys are commented out."""
    parents: dict[str, Any] = {
        "publish": {"folder": "p"},
        "records": {},
        "track": {},
        "source": {"jsonl": {"path": "data.jsonl"}},
    }
    empty = jsonl(**({path[0]: None} if len(path) == 1 else {path[0]: {**parents[path[0]], path[1]: None}}))
    if path in (("source",), ("source", "jsonl")):
        with pytest.raises(ConfigError, match=r"source: (required, but missing|exactly one of .* found none)"):
            load(write(tmp_path, empty))
    else:
        without = jsonl(**({} if len(path) == 1 else {path[0]: parents[path[0]]}))
        assert load(write(tmp_path, empty)) == load(write(tmp_path, without))


def schema_of(annotation: Any) -> Any:
    return TypeAdapter(annotation).json_schema()


def numbers(kind: str) -> list[tuple[str, ...]]:
    """Every setting that may be a number of this kind, by its keys."""
    return [
        (*path, name)
        for path in ((), *sections(Settings))
        for name, field in section_at(Settings, path).model_fields.items()  # type: ignore[union-attr]
        if section_type(field.annotation) is None and f"'{kind}'" in str(schema_of(field.annotation))
    ]


REQUIRED: dict[str, dict[str, Any]] = {
    "kafka": LOCAL,
    "jsonl": {"path": "a"},
    "publish": {"folder": "p"},
    "vllm": {"replicas": ["http://[::1]:1"]},
    "mlflow": {"uri": "http://[::1]:1"},
    "registry": {"url": "http://[::1]:1"},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((path, value) for path in numbers("number") + numbers("integer") for value in ("inf", "-inf", "nan")),
        *((path, value) for path in numbers("integer") for value in (f"1{'0' * 20}", f"-1{'0' * 20}")),
    ],
    ids=lambda value: value if isinstance(value, str) else ".".join(value),
)
def test_every_number_is_finite_and_every_integer_has_64_bits(
    tmp_path: Path, path: tuple[str, ...], value: str
) -> None:
    """Another one is refused with its key before anything starts."""
    wrong: Any = int(value) if value[-1] == "0" else float(value)
    if path[-1] == "betas":
        wrong = [0.9, wrong]
    for depth, name in reversed(list(enumerate(path))):
        wrong = {**(REQUIRED.get(path[depth - 1], {}) if depth else {}), name: wrong}
    with pytest.raises(ConfigError, match=rf"{'.'.join(path)}: expected .*found"):
        load(write(tmp_path, jsonl() | wrong))


def test_every_wait_is_one_that_the_system_can_wait_for() -> None:
    """Locks and events wait at most `threading.TIMEOUT_MAX`; sockets at most 2^31 milliseconds."""
    waits = [path for path in numbers("number") if path[-1].endswith("_s")]
    assert len(waits) > 10
    for path in waits:
        field = section_at(Settings, path[:-1]).model_fields[path[-1]]  # type: ignore[union-attr]
        schema = schema_of(Annotated[field.annotation, field])
        longest = min(option["maximum"] for option in schema.get("anyOf", [schema]) if "maximum" in option)
        assert longest < (2**31 / 1000 if "timeout" in path[-1] and path[-1] != "stall_timeout_s" else TIMEOUT_MAX), (
            path
        )


CONFIG_MAP = "..2026_01_01_00_00_00.111"


def test_paths_start_at_the_file_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a Kubernetes ConfigMap are links into a folder that every update renames."""
    folder = tmp_path / "app/config"
    (folder / CONFIG_MAP).mkdir(parents=True)
    write(folder / CONFIG_MAP, {**jsonl(), "state": "../data/state"})
    (folder / "..data").symlink_to(CONFIG_MAP)
    (folder / "config.yaml").symlink_to("..data/config.yaml")
    (tmp_path / "elsewhere").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for name in (folder / "config.yaml", Path("app/config/config.yaml"), Path("app/../app/config/config.yaml")):
        settings = load(name)
        assert settings.state == tmp_path / "app/data/state"
        assert settings.source.jsonl is not None
        assert settings.source.jsonl.path == folder / "data.jsonl"
    assert load(Path("elsewhere/config.yaml")).state == tmp_path / "data/state"


def test_paths_are_not_followed_either(tmp_path: Path) -> None:
    """A Secret's files are replaced by another link, which a running daemon must find."""
    (tmp_path / "..data").symlink_to(CONFIG_MAP)
    (tmp_path / "token").symlink_to("..data/token")
    assert load(write(tmp_path, jsonl(serve={"token_file": "token"}))).serve.token_file == tmp_path / "token"


def test_a_home_directory_that_is_not_known_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a random user id in a container, without HOME."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"~/state: the home directory is not known: set HOME"):
        load(write(tmp_path, jsonl(state="~/state")))


@pytest.mark.parametrize("path", ["/dev/fd/{}", "/proc/self/fd/{}", "/dev/stdin"])
def test_paths_of_a_pipe_start_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """`--config <(envsubst < config.yaml)`."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, jsonl())
    with file.open() as pipe:
        before = os.dup(0)
        os.dup2(pipe.fileno(), 0)
        try:
            assert load(Path(path.format(pipe.fileno()))).state == tmp_path / "state"
        finally:
            os.dup2(before, 0)
            os.close(before)


ROOT = Path(__file__).parents[2]
NAMES = ("image-text", "kafka-local", "mission", "prod", "quickstart", "smollm2")


@pytest.fixture
def as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as a wheel lays it out, read-only, and an empty current directory."""
    package = tmp_path / "site-packages/streamlearn"
    for name in ("configs", "systemd"):
        shutil.copytree(ROOT / name, package / "_data" / name)
    monkeypatch.setattr("streamlearn.settings.settings._PACKAGE", package)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return package


@pytest.mark.parametrize("name", ["quikstart", "", "../configs/quickstart", "sample/README"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    """Only names are accepted, never paths."""
    with pytest.raises(ConfigError, match=", ".join(NAMES)) as caught:
        load(Path(f"packaged:{name}"))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_configuration_loads(name: str, as_installed: Path) -> None:
    """As it does from its file."""
    del as_installed
    there, here = load(Path(f"packaged:{name}")), load(ROOT / f"configs/{name}.yaml")
    assert there.model_copy(update={name: getattr(here, name) for name in ("state", "source", "backbone")}) == here


def test_a_packaged_configuration_reads_its_sample_and_writes_to_the_current_directory(as_installed: Path) -> None:
    """The sample ships beside it; `state` is where a checkout of the current directory would have it."""
    settings = load(Path("packaged:quickstart"))
    assert settings.state == Path.cwd() / "build/quickstart"
    assert settings.source.jsonl is not None
    assert settings.source.jsonl.path == as_installed / "_data/configs/sample/superni.train.jsonl.gz"
    assert settings.source.jsonl.path.is_file()


def test_relative_paths_from_the_environment_start_at_the_current_directory(
    as_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user sees the current directory, not the folder that the package is installed in."""
    del as_installed
    monkeypatch.setenv("STREAMLEARN_STATE", "elsewhere")
    monkeypatch.setenv("STREAMLEARN_SOURCE__JSONL__PATH", "records.jsonl")
    settings = load(Path("packaged:quickstart"))
    assert settings.source.jsonl is not None
    assert (settings.state, settings.source.jsonl.path) == (Path.cwd() / "elsewhere", Path.cwd() / "records.jsonl")
