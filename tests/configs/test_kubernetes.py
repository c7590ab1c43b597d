"""The Kubernetes manifests: valid by Kubernetes' own schemas, and consistent."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamlearn.settings import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
VERSION = "1.33"


def secret_files() -> list[str]:
    [generator] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["secretGenerator"]
    return [Path(name).name for name in generator["files"]]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `kubectl apply -k` applies."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on PATH")
    folder = tmp_path_factory.mktemp("kubernetes") / "base"
    shutil.copytree(FOLDER, folder)
    (folder / "secret").mkdir()
    for name in secret_files():
        (folder / "secret" / name).write_text("x")
    built = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(built.stdout))


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [manifest] = [each for each in manifests if each["kind"] == kind]
    return manifest


def test_kubernetes_schemas_accept_every_manifest(manifests: list[dict[str, Any]]) -> None:
    """Those of the Prometheus operator's resources are not Kubernetes' own."""
    validate = pytest.importorskip("kubernetes_validate").validate
    own = [manifest for manifest in manifests if "monitoring.coreos.com" not in manifest["apiVersion"]]
    assert {manifest["kind"] for manifest in own} == {"ConfigMap", "Secret", "Service", "StatefulSet"}
    for manifest in own:
        validate(manifest, VERSION, strict=True)


def test_names_and_labels_meet(manifests: list[dict[str, Any]]) -> None:
    """The pod mounts what is generated, the Service finds the pod, the ServiceMonitor the Service and its keys."""
    stateful, service = of_kind(manifests, "StatefulSet"), of_kind(manifests, "Service")
    spec, monitor = stateful["spec"]["template"]["spec"], of_kind(manifests, "ServiceMonitor")["spec"]
    assert stateful["spec"]["replicas"] == 1
    assert spec["enableServiceLinks"] is False
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["config"]["configMap"]["name"] == of_kind(manifests, "ConfigMap")["metadata"]["name"]
    secret = of_kind(manifests, "Secret")
    assert volumes["secret"]["secret"]["secretName"] == secret["metadata"]["name"] == "streamlearn"
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "streamlearn"  # `job` of the alert rules
    [endpoint], [port] = monitor["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    for credential in (endpoint["authorization"]["credentials"], endpoint["tlsConfig"]["ca"]["secret"]):
        assert credential["name"] == "streamlearn"
        assert credential["key"] in secret["data"]


def test_the_configuration_names_files_of_the_secret() -> None:
    settings = load(FOLDER / "config.yaml")
    kafka, serve = settings.source.kafka, settings.serve
    assert kafka is not None
    named = {kafka.sasl_plain_password_file, kafka.ssl_cafile, serve.token_file, serve.tls_certfile, serve.tls_keyfile}
    assert named == {Path("/etc/streamlearn/secret") / name for name in secret_files()}
