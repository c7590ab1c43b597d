"""Every unit, image, compose service and pod that ships starts, with exactly its environment, user, modes and mounts.

The files themselves are read: what they say is not repeated here. Only the configuration is a small one, of a file.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from streamlearn.settings import load
from tests.confined import installed, needs_root, run_confined
from tests.connectors.kafka.secured import Authority
from tests.doubles import tiny_backbone
from tests.systemd.test_unit import service_of

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "systemd").glob("*.service"))
CONTAINERFILE = (ROOT / "configs/container/Containerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "configs/container/compose.yaml").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = {
    name: service
    for name, service in yaml.safe_load(COMPOSE)["services"].items()
    if "streamlearn" in service["image"] and "KAFKA" not in service["image"]
}
DYNAMIC_USER = 61184
"""The first that systemd's DynamicUser= takes."""
ETC = "/etc/streamlearn"
SECRET = "a-token-of-at-least-32-characters-0123"  # noqa: S105 - of the test
PATH = "/usr/local/bin:/usr/bin:/bin"


def interpolated(text: str) -> set[str]:
    """Names of the variables that a file reads from its environment."""
    return set(re.findall(r"(?<!\$)\$\{(\w+)", text))


def test_no_variable_that_a_shipped_file_reads_is_taken_for_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that has them runs every command."""
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: records.jsonl}}")
    names = set().union(*(interpolated(text) for text in (COMPOSE, *(unit.read_text() for unit in UNITS))))
    assert len(names) > 3
    for name in names:
        monkeypatch.setenv(name, "2")
    assert load(config).seed == 0


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """A folder as /etc/streamlearn: the configuration of a daemon that learns a file to its end, and its parts."""
    folder = tmp_path / "etc"
    (folder / "backbone").mkdir(parents=True)
    tiny_backbone(folder / "backbone")
    row = orjson.dumps({"prompt": "the quick brown fox", "completion": " jumps over the lazy dog"})
    (folder / "records.jsonl").write_bytes((row + b"\n") * 24)
    config = {
        "state": "/var/lib/streamlearn/state",
        "source": {"jsonl": {"path": "records.jsonl"}},
        "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 8},
        "backbone": {"model": "./backbone", "dtype": "float32"},
        "serve": {"port": 0},
        "log": {"style": "json"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for path in (folder / "backbone").iterdir():
        path.chmod(0o644)
    return folder


def owned(folder: Path, uid: int, mode: int) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, uid, uid)
    return folder


def environment_of(unit: Path, service: dict[str, list[str]]) -> dict[str, str]:
    """The environment of a service: what systemd sets, the unit's, and its file with every optional line."""
    name = unit.name
    environ = {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "STATE_DIRECTORY": "/var/lib/streamlearn",
        "CACHE_DIRECTORY": "/var/cache/streamlearn",
        "CREDENTIALS_DIRECTORY": f"/run/credentials/{name}",
        "INVOCATION_ID": "0" * 32,
        "SYSTEMD_EXEC_PID": "1",
    }
    own = [word for line in service.get("Environment", []) for word in shlex.split(line)]
    file = (ROOT / "systemd" / Path(service["EnvironmentFile"][0].lstrip("-")).name).read_text(encoding="utf-8")
    of_file = [line.lstrip("#") for line in file.splitlines() if re.match(r"#?[A-Z_]+=", line)]
    assert of_file
    return environ | dict(word.split("=", 1) for word in [*own, *of_file])


@needs_root
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.parametrize("owner", ["service", "root"])
def test_every_unit_learns_to_the_end(unit: Path, owner: str, etc: Path, tmp_path: Path) -> None:
    """As the user, with the credential either its own or root's and readable by its group."""
    service = service_of(unit)
    credential = service["LoadCredential"][0].partition(":")[0]
    place = f"/run/credentials/{unit.name}"
    credentials = owned(tmp_path / "credentials", DYNAMIC_USER, 0o500)
    secret = credentials / credential
    secret.write_text(SECRET)
    secret.chmod(0o400 if owner == "service" else 0o440)
    os.chown(secret, DYNAMIC_USER if owner == "service" else 0, DYNAMIC_USER)
    config = yaml.safe_load((etc / "config.yaml").read_text())
    config["serve"]["token_file"] = f"{place}/{credential}"
    (etc / "config.yaml").write_text(yaml.safe_dump(config))
    state = owned(tmp_path / "state", DYNAMIC_USER, int(service["StateDirectoryMode"][0], 8))
    cache = owned(tmp_path / "cache", DYNAMIC_USER, 0o755)
    environ = environment_of(unit, service)
    command = re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], service["ExecStart"][0])
    ended = run_confined(
        shlex.split(command),
        environ,
        {
            **installed(),
            ETC: etc,
            place: credentials,
            "/var/lib/streamlearn": state,
            "/var/cache/streamlearn": cache,
        },
        uid=DYNAMIC_USER,
        umask=service["UMask"][0],
        writable=("/var/lib/streamlearn", "/var/cache/streamlearn"),
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [path.name for path in (state / "state/snapshots").glob("0*")]


def image() -> tuple[dict[str, str], int, list[str], list[str], list[str]]:
    """Environment, user, volumes, entrypoint and command of the image."""
    final = CONTAINERFILE.rpartition("\nFROM ")[2].replace("\\\n", " ")
    [variables] = re.findall(r"(?m)^ENV (.*)$", final)
    environ = {"PATH": PATH, "HOME": "/var/lib/streamlearn"}
    for word in shlex.split(variables):
        name, _, value = word.partition("=")
        environ[name] = value.replace("$PATH", PATH)
    [user] = re.findall(r"useradd --uid (\d+)", final)
    lists = [orjson.loads(re.findall(rf"(?m)^{key} (\[.*\])$", final)[0]) for key in ("VOLUME", "ENTRYPOINT", "CMD")]
    return environ, int(user), *lists


def start_image(arguments: list[str], mounts: dict[str, Path], tmp_path: Path, **added: str) -> str:
    """Run the image with these arguments on a read-only root, as compose.yaml does; return what it printed."""
    environ, uid, volumes, entrypoint, _ = image()
    writable = {volume: owned(tmp_path / Path(volume).parent.name, uid, 0o755) for volume in volumes}
    program = [f"/opt/streamlearn/bin/{entrypoint[0]}", *entrypoint[1:]]
    every = {**installed(), **mounts, **writable}
    ended = run_confined([*program, *arguments], environ | added, every, uid=uid, writable=writable)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@needs_root
def test_the_image_learns_to_the_end(etc: Path, tmp_path: Path) -> None:
    """With its own command, and the health port that its environment sets."""
    *_, command = image()
    start_image(command, {ETC: etc}, tmp_path)
    assert [path.name for path in (tmp_path / "lib/state/snapshots").glob("0*")]


@needs_root
@pytest.mark.parametrize("name", SERVICES)
def test_every_compose_service_of_the_image_starts(name: str, tmp_path: Path) -> None:
    """Without a broker: its configuration is checked, and its records are read but not sent."""
    service = SERVICES[name]
    assert service["read_only"]
    verb, *arguments = service["command"]
    mounts = {
        inside: (ROOT / "configs/container" / outside).resolve()
        for outside, inside, *_ in (volume.split(":") for volume in service.get("volumes", []))
        if outside.startswith(".")
    }
    instead = {"run": ["check-config", *arguments], "feed": ["feed", *arguments, "--dry-run", "--records", "3"]}
    said = start_image(instead[verb], mounts, tmp_path, **service.get("environment", {}))
    assert "valid" in said if verb == "run" else "3 records" in said


def linked(folder: Path, files: dict[str, bytes], mode: int, gid: int = 0) -> Path:
    """A folder as a kubelet mounts a ConfigMap or Secret: files of root, each a link into a folder with a date."""
    own = folder / "..2026_01_01_00_00_00.111"
    own.mkdir(parents=True)
    (folder / "..data").symlink_to(own.name)
    for name, content in files.items():
        (own / name).write_bytes(content)
        (own / name).chmod(mode)
        os.chown(own / name, 0, gid)
        (folder / name).symlink_to(f"..data/{name}")
    return folder


@needs_root
def test_the_pod_learns_to_the_end(etc: Path, tmp_path: Path) -> None:
    """Its own configuration but for the source, the backbone and the stream: with TLS and a token of the Secret."""
    folder = ROOT / "configs/kubernetes"
    pod = yaml.safe_load((folder / "statefulset.yaml").read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    [container], user = pod["containers"], pod["securityContext"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    small = yaml.safe_load((etc / "config.yaml").read_text())
    config = {key: value for key, value in config.items() if key != "dead_letters"} | {
        key: small[key] for key in ("source", "stream", "backbone")
    }
    config["source"]["jsonl"]["path"] = f"{ETC}/small/records.jsonl"
    config["backbone"]["model"] = f"{ETC}/small/backbone"
    certificate, key = Authority(tmp_path / "authority").issue("streamlearn")
    names = [
        Path(name).name
        for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["secretGenerator"][0]["files"]
    ]
    contents = {".crt": certificate.read_bytes(), ".key": key.read_bytes()}
    secret = {name: contents.get(Path(name).suffix, SECRET.encode()) for name in names}
    volumes = {
        "config": linked(tmp_path / "config", {"config.yaml": yaml.safe_dump(config).encode()}, 0o644),
        "state": owned(tmp_path / "state", user["runAsUser"], 0o770),
    }
    for volume in pod["volumes"]:
        if "secret" in volume:
            mode = volume["secret"]["defaultMode"]
            volumes[volume["name"]] = linked(tmp_path / "secret", secret, mode, user["fsGroup"])
    mounts = {
        mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"] if mount["name"] != "tmp"
    }
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    environ, _, _, entrypoint, _ = image()
    requests = {f"requests.{name}": value for name, value in container["resources"]["requests"].items()}
    for variable in container["env"]:
        match variable.get("valueFrom"):
            case None:
                environ[variable["name"]] = variable["value"]
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                environ[variable["name"]] = "10.0.0.7"
            case {"resourceFieldRef": {"resource": name}}:
                environ[variable["name"]] = requests[name]
    environ = {name: value.replace("$(POD_IP)", "10.0.0.7") for name, value in environ.items()}
    environ |= {f"STREAMLEARN_{name}": "tcp://10.96.14.3:8083" for name in ("PORT", "PORT_8083_TCP", "SERVICE_HOST")}
    ended = run_confined(
        [f"/opt/streamlearn/bin/{entrypoint[0]}", *container["args"]],
        environ,
        {**installed(), f"{ETC}/small": etc, **mounts},
        uid=user["runAsUser"],
        gid=user["runAsGroup"],
        writable=writable,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [path.name for path in (volumes["state"] / "state/snapshots").glob("0*")]
