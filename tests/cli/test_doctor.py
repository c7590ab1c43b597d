"""`doctor` and `check-config` name every fault that a start would fail on, and change nothing."""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from typer.testing import CliRunner

from connectors.jsonl import JsonlSource
from streamlearn.board import Board, Clock
from streamlearn.cli import doctor
from streamlearn.cli.doctor import STATE_FILES, Doctor, Finding, Level, check_backbone
from streamlearn.cli.main import app
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import ConfigError
from streamlearn.jobs.queue import JobQueue
from streamlearn.settings import Settings
from streamlearn.snapshot.files import StateLock
from streamlearn.status import Phase, Status
from streamlearn.stream.position import OffsetRange, Position
from tests.broker import Broker
from tests.doubles import tiny_backbone

Make = Callable[..., Settings]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture
def make(tmp_path: Path, backbone: Path) -> Make:
    """Settings for a file of one record; whole sections may be replaced."""

    def build(**sections: Any) -> Settings:
        (tmp_path / "stream.jsonl").write_bytes(orjson.dumps({"text": "hello small world"}) + b"\n")
        given = {
            "state": tmp_path / "state",
            "source": {"jsonl": {"path": tmp_path / "stream.jsonl"}},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "serve": {"port": 0},
            "stream": {"max_tokens": 32, "batch_tokens": 32},
        }
        return Settings.model_validate({**given, **sections})

    return build


def examined(settings: Settings) -> dict[str, Finding]:
    return {finding.name: finding for finding in Doctor(settings).examine()}


def learn(settings: Settings) -> None:
    components = Components(settings)
    Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1)).run()
    components.close()


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_healthy_setup_is_found_healthy_and_left_as_it_was(make: Make, tmp_path: Path) -> None:
    """Before the first start and after one."""
    settings = make()
    before = tree(tmp_path)
    assert {name: f.level for name, f in examined(settings).items()} == dict.fromkeys(
        (
            "clock",
            "backbone",
            "publishing",
            "trackers",
            "arithmetic",
            "state folder",
            "snapshots",
            "disk",
            "regimes",
            "codecs",
            "source",
            "dead letters",
            "http",
        ),
        Level.OK,
    )
    assert tree(tmp_path) == before
    learn(settings)
    before = tree(tmp_path)
    found = examined(settings)
    assert {f.level for f in found.values()} == {Level.OK}
    assert "resumes after step 1 at" in found["snapshots"].text
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("sections", "name", "words", "code"),
    [
        ({"backbone": {"model": "owner/name"}}, "backbone", "needs a pinned commit of 40 hex digits, found None", 78),
        ({"backbone": {"model": "owner/name", "revision": "main"}}, "backbone", "found 'main'", 78),
        ({"dead_letters": {"file": "/dev/null/x.jsonl"}}, "dead letters", "/dev/null is not a folder", 74),
        ({"dead_letters": {"file": "/usr"}}, "dead letters", "Is a directory", 74),
        ({"source": {"jsonl": {"path": "/nowhere/x.jsonl"}}}, "source", "/nowhere/x.jsonl", 74),
        ({"adapter": {"num_heads": 3}}, "backbone", "num_heads: must divide", 78),
        ({"backbone": {"model": "/nowhere"}}, "backbone", "no such folder", 78),
        ({"state": "/dev/null/state"}, "state folder", "cannot be created, /dev/null is not a folder", 74),
        ({"publish": {"folder": "/dev/null/x"}}, "publishing", "/dev/null: must be writable", 74),
        ({"publish": {"folder": "gs://bucket/x"}}, "publishing", "found: Please install gcsfs", 78),
        ({"publish": {"folder": "nosuch://bucket/x"}}, "publishing", "expected a scheme such as s3", 78),
        ({"publish": {"folder": "/x"}, "holdout": {"every_records": 0}}, "publishing", "holdout.every_records 0", 78),
        (
            {"publish": {"folder": "/x", "vllm": {"replicas": ["http://[::1]:1"], "token_file": "/nowhere/key"}}},
            "publishing",
            "/nowhere/key: the token cannot be read",
            78,
        ),
        (
            {"track": {"mlflow": {"uri": "http://[::1]:1", "token_file": "/nowhere/key"}}},
            "trackers",
            "/nowhere/key: the token cannot be read",
            78,
        ),
        ({"serve": {"port": 0, "token_file": "/nowhere/token"}}, "http", "token cannot be read", 78),
        ({"serve": {"port": 0, "tls_certfile": "/nowhere/c", "tls_keyfile": "/nowhere/k"}}, "http", "/nowhere/c", 78),
    ],
)
def test_what_a_start_would_refuse_is_named(
    make: Make, sections: dict[str, Any], name: str, words: str, code: int
) -> None:
    """With the exit code that the start would end with; checks that depend on it are skipped."""
    found = examined(make(**sections))
    assert (found[name].level, found[name].exit_code) == (Level.FAILED, code)
    assert words in found[name].text
    assert all(f.level is not Level.FAILED for other, f in found.items() if other != name)


def test_what_is_published_and_tracked_is_named_and_nothing_is_created(make: Make, tmp_path: Path) -> None:
    """Also where the backbone, which publishing is compared with, is not on this machine."""
    publish = {"folder": tmp_path / "published", "vllm": {"replicas": ["http://[::1]:1", "http://[::1]:2"]}}
    track = {"tensorboard": tmp_path / "runs", "mlflow": {"uri": "http://[::1]:3"}}
    settings = make(publish=publish, track=track)
    before = tree(tmp_path)
    found = examined(settings)
    assert found["publishing"] == Finding(
        "publishing", Level.OK, f"{tmp_path / 'published'}, which will be created; model servers: 2, not asked"
    )
    assert found["trackers"] == Finding("trackers", Level.OK, f"{tmp_path / 'runs'}; http://[::1]:3, not asked")
    assert tree(tmp_path) == before
    absent = make(publish=publish, backbone={"model": "owner/name", "revision": "0" * 40, "dtype": "float32"})
    assert examined(absent)["publishing"].level is Level.OK


def test_an_object_store_that_does_not_answer_is_a_warning(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does not depend on it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    found = examined(make(publish={"folder": "s3://bucket/x"}))["publishing"]
    assert found.level is Level.WARNING
    assert "s3://bucket/x: expected a store that answers" in found.text


def test_files_that_publishing_and_tracking_left_are_read(make: Make, tmp_path: Path) -> None:
    """A damaged one ends a start."""
    folder = tmp_path / "published"
    folder.mkdir()
    settings = make(publish={"folder": folder}, track={"mlflow": {"uri": "http://[::1]:3"}})
    settings.state.mkdir()
    (settings.state / "track.run").write_bytes(b"{")
    found = examined(settings)
    assert found["publishing"] == Finding("publishing", Level.OK, f"{folder}")
    assert (found["trackers"].level, found["trackers"].exit_code) == (Level.FAILED, 78)
    assert "track.run must name the tracked run" in found["trackers"].text
    for damaged in (settings.state / "publish.rolled_back_to", folder / "publication.json"):
        damaged.write_bytes(b"{")
        found = examined(settings)
        assert (found["publishing"].level, found["publishing"].exit_code) == (Level.FAILED, 74)
        assert str(damaged) in found["publishing"].text


def test_a_tracker_that_cannot_write_is_a_warning(make: Make) -> None:
    """Training does not depend on it."""
    found = examined(make(track={"tensorboard": "/dev/null/runs"}))["trackers"]
    assert found.level is Level.WARNING
    assert found.text.startswith("/dev/null/runs cannot be written, /dev/null is not a folder")


def test_a_port_that_is_taken_is_found(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = examined(make(serve={"port": port}))["http"]
    assert found.level is Level.FAILED
    assert f"127.0.0.1:{port} cannot be bound" in found.text


class Expired(JsonlSource):
    """A source that starts four lines late, as a topic does if gaps are allowed."""

    def seek(
        self,
        position: Position,
        identity: Mapping[str, str] | None = None,
        skipped: Sequence[OffsetRange] = (),
    ) -> Position:
        return Position({origin: line + 4 for origin, line in super().seek(position, identity, skipped).items()})


def test_what_a_start_would_skip_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exact offsets, while there is still time to change the policy."""
    settings = make()
    learn(settings)
    monkeypatch.setattr("streamlearn.cli.doctor.open_source", lambda source, **_: Expired(source.jsonl))
    found = examined(settings)["source"]
    assert found.level is Level.WARNING
    assert "a start skips stream.jsonl-0 [1, 5)" in found.text


def test_a_running_daemon_is_no_fault(make: Make) -> None:
    settings = make()
    learn(settings)
    with StateLock(settings.state):
        found = examined(settings)
    assert found["state folder"].level is Level.WARNING
    assert "a daemon is running" in found["state folder"].text
    assert all(f.exit_code == 0 for f in found.values())


def test_damage_and_change_are_told_apart(make: Make) -> None:
    """A damaged newest snapshot is a warning; another adapter, and no valid snapshot at all, are faults."""
    settings = make()
    learn(settings)
    other = examined(make(adapter={"num_heads": 4, "num_experts": 2}))["snapshots"]
    assert (other.level, other.exit_code) == (Level.FAILED, 78)
    assert "another adapter" in other.text
    *_, newest = sorted((settings.state / "snapshots").iterdir())
    (newest / "state.safetensors").write_bytes(b"")
    found = examined(settings)["snapshots"]
    assert found.level is Level.WARNING
    assert f"damaged: {newest}" in found.text
    for each in (settings.state / "snapshots").iterdir():
        (each / "state.safetensors").write_bytes(b"")
    found = examined(settings)["snapshots"]
    assert found.level is Level.FAILED
    assert "--fresh" in found.text
    assert found.exit_code == 74
    for each in (settings.state / "snapshots").iterdir():
        each.rename(each.with_name(f"damaged-{each.name}"))
    found = examined(settings)["snapshots"]
    assert (found.level, found.exit_code) == (Level.FAILED, 74)
    assert "damaged-0000000" in found.text


def test_a_hub_model_that_would_be_fetched_is_a_warning(make: Make) -> None:
    """No model is fetched, and what needs it is skipped."""
    found = examined(make(backbone={"model": "owner/name", "revision": "0" * 40, "dtype": "float32"}))
    assert found["backbone"].level is Level.WARNING
    assert "the first start fetches it" in found["backbone"].text
    assert found["snapshots"] == Finding("snapshots", Level.SKIPPED, "needs backbone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_this_machine_lacks_is_found(make: Make, backbone: Path) -> None:
    found = examined(make(backbone={"model": str(backbone), "device": "cuda"}))["arithmetic"]
    assert (found.level, found.exit_code) == (Level.FAILED, 78)
    assert "backbone.device cuda" in found.text


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_state_file_that_cannot_be_written_is_found(make: Make, name: str) -> None:
    """With exit code 74, as the start itself."""
    settings = make()
    (settings.state / name).mkdir(parents=True)
    found = examined(settings)["state folder"]
    assert (found.level, found.exit_code) == (Level.FAILED, 74)
    assert f"{settings.state / name}: must be readable and writable, found: Is a dir" in found.text


def test_state_files_are_those_that_a_start_writes(make: Make) -> None:
    """Of every file that a run leaves in its state folder."""
    settings = make()
    learn(settings)
    written = {path.name for path in settings.state.iterdir() if path.is_file()}
    assert written - {"lock", "dead_letters.jsonl"} <= set(STATE_FILES)


def test_a_snapshot_of_another_format_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 78, as the start."""
    settings = make()
    learn(settings)
    monkeypatch.setattr("streamlearn.snapshot.manifest.FORMAT_VERSION", 99)
    found = examined(settings)["snapshots"]
    assert (found.level, found.exit_code) == (Level.FAILED, 78)
    assert "format" in found.text


def test_a_certificate_that_tls_cannot_use_is_found(make: Make, tmp_path: Path) -> None:
    """A file that exists but is not PEM."""
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("not PEM")
        (tmp_path / name).chmod(0o600)
    tls = {"tls_certfile": tmp_path / "cert.pem", "tls_keyfile": tmp_path / "key.pem"}
    found = examined(make(serve={"port": 0, **tls}))["http"]
    assert (found.level, found.exit_code) == (Level.FAILED, 78)
    assert f"tls_certfile {tmp_path / 'cert.pem'}" in found.text


@pytest.mark.parametrize("enabled", [True, False])
def test_a_health_port_that_is_taken_is_found(make: Make, enabled: bool) -> None:
    """Checked on its own address, whether or not the endpoint is served."""
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - the setting's default
        port = taken.getsockname()[1]
        found = examined(make(serve={"enabled": enabled, "port": 0, "health_port": port}))["http"]
    assert (found.level, found.exit_code) == (Level.FAILED, 78)
    assert f"0.0.0.0:{port} cannot be bound" in found.text
    assert "set serve.health_port" in found.text


@pytest.mark.broker
def test_a_cluster_is_checked(make: Make, broker: Broker) -> None:
    """Topics, dead letters and lag."""
    topic, dead = broker.new_topic(), broker.new_topic()
    broker.produce(topic, [b'{"text": "hello small world"}'] * 5)
    kafka = {"bootstrap_servers": broker.servers, "group_id": "doctor", "security_protocol": "PLAINTEXT"}
    source = {"kafka": {**kafka, "topics": [topic]}}
    found = examined(make(source=source, dead_letters={"topic": dead}))
    assert {f.level for f in found.values()} == {Level.OK}
    assert "5 offsets behind the end" in found["source"].text
    missing = examined(make(source={"kafka": {**kafka, "topics": ["nowhere"]}}, dead_letters={"topic": "nobody"}))
    assert "nowhere" in missing["source"].text
    assert "nobody" in missing["dead letters"].text
    assert (missing["source"].exit_code, missing["dead letters"].exit_code) == (74, 74)


def test_regimes_that_the_machine_has_no_room_for_are_a_warning(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk for all, memory for those that are in use; the text has both, and the key to change."""
    settings = make(shift={"max_regimes": 100}, adapter={"num_heads": 4, "max_in_memory": 10})
    found = examined(settings)["regimes"]
    assert found.level == Level.OK
    assert found.text.startswith("at most 100 adapters of ")
    assert "for 10 of them" in found.text
    monkeypatch.setattr(doctor, "COPIES", 1 << 40)
    assert "lower shift.max_regimes" in examined(settings)["regimes"].text
    shared = examined(make(adapter={"num_heads": 4, "preset": "mh-moe"}))["regimes"]
    assert shared.text == "at most 256, which share one adapter"


def test_the_largest_step_is_taken_if_asked_for(make: Make) -> None:
    """With the batch that the configuration allows; nothing is left behind."""
    settings = make(stream={"max_tokens": 32, "batch_tokens": 80})
    *_, step = Doctor(settings, takes_step=True).examine()
    assert (step.name, step.level) == ("step", Level.OK)
    assert step.text.startswith("80 tokens in records of 32 took ")
    assert "peak memory " in step.text
    assert not settings.state.exists()
    *_, step = Doctor(make(learner={"rehearsal": 0.1}), takes_step=True).examine()
    assert step.text.endswith(", with as many rehearsed")


PINNED = "0123456789abcdef" * 2 + "01234567"


def configured(**sections: Any) -> Settings:
    return Settings.model_validate({"source": {"jsonl": {"path": "stream.jsonl"}}, **sections})


def test_an_adapter_that_fits_is_described() -> None:
    """With the parameters that a token activates."""
    assert check_backbone(configured()).startswith("valid; adapter streamlearn fits builtin:nano, ")


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"model": "owner/name"}, r"backbone\.revision: .*40 hex digits.*None"),
        ({"model": "owner/name", "revision": "main"}, r"backbone\.revision: .*40 hex digits.*main"),
        ({"model": "/nowhere/model"}, r"backbone\.model /nowhere/model: no such folder"),
        ({"model": "builtin:nono"}, r"backbone\.model builtin:nono: no such model; builtin models are builtin:nano"),
        ({"device": "gpu"}, r"backbone\.device: expected auto, cpu, cuda or cuda:N, found 'gpu'"),
    ],
)
def test_a_backbone_that_run_refuses_is_refused(backbone: dict[str, str], message: str) -> None:
    """A hub id that is not pinned, a folder that is not there, a name that is unknown."""
    with pytest.raises(ConfigError, match=message) as refused:
        check_backbone(configured(backbone=backbone))
    assert refused.value.exit_code == 78


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"safetensors"):
        check_backbone(configured(backbone={"model": str(tmp_path)}))


def test_an_adapter_that_does_not_fit_a_local_folder_is_refused(tmp_path: Path) -> None:
    folder = tiny_backbone(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter\.num_heads: must divide"):
        check_backbone(configured(backbone={"model": str(folder)}, adapter={"num_heads": 3}))


def test_a_pinned_hub_model_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays valid without network; the message says what was not checked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = configured(backbone={"model": "owner/name", "revision": PINNED, "device": "cuda"})
    assert check_backbone(model) == ("valid; backbone owner/name would be fetched on first start, adapter not checked")
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize("backbone", [{}, {"model": "owner/name", "revision": PINNED}])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"holdout": {"every_records": 0}, "publish": {}}, r"found holdout\.every_records 0"),
        ({"publish": {"min_holdout_records": 10}, "holdout": {"records_per_regime": 5}}, "min_holdout_records must be"),
        ({"publish": {"vllm": {"replicas": ["http://[::1]:1"], "token_file": "/nowhere/key"}}}, "/nowhere/key: the"),
        ({"track": {"mlflow": {"uri": "http://[::1]:1", "token_file": "/nowhere/key"}}}, "/nowhere/key: the"),
    ],
)
def test_what_cannot_be_published_or_tracked_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backbone: dict[str, str],
    sections: dict[str, dict[str, Any]],
    message: str,
) -> None:
    """As a start does; also where the backbone is not on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if "publish" in sections:
        sections = {**sections, "publish": {"folder": tmp_path / "published", **sections["publish"]}}
    with pytest.raises(ConfigError, match=message):
        check_backbone(configured(backbone=backbone, **sections))


def test_the_published_folder_is_for_doctor_to_check(tmp_path: Path) -> None:
    """It need not be on the machine that checks a configuration, and is not created."""
    assert check_backbone(configured(publish={"folder": tmp_path / "published"})).startswith("valid; ")
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_78(tmp_path: Path) -> None:
    """With what is wrong."""
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: a.jsonl}}\nholdout: {every_records: 0}\npublish: {folder: published}\n")
    result = CliRunner().invoke(app, ["check-config", "--config", str(config)])
    assert isinstance(result.exception, ConfigError)
    assert "the gate needs hold-out records" in str(result.exception)
