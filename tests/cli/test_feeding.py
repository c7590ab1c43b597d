"""`streamlearn feed`: which cluster it writes to. Sending itself is tested with a broker in tests/connectors."""

from pathlib import Path

import pytest

from streamlearn.cli.feed import cluster_of
from streamlearn.errors import UsageError


def write(folder: Path, source: str) -> Path:
    config = folder / "config.yaml"
    config.write_text(f"source: {source}\n")
    return config


def test_the_cluster_is_that_of_the_configuration(tmp_path: Path) -> None:
    config = write(
        tmp_path, "{kafka: {bootstrap.servers: 'localhost:9092', topics: [t], security.protocol: PLAINTEXT}}"
    )
    assert cluster_of(config, None).bootstrap_servers == "localhost:9092"


def test_a_local_broker_needs_no_configuration() -> None:
    cluster = cluster_of(None, "127.0.0.1:9092")
    assert (cluster.bootstrap_servers, cluster.security_protocol) == ("127.0.0.1:9092", "PLAINTEXT")


def test_a_broker_on_another_machine_needs_a_configuration() -> None:
    """The message says so; it is not a traceback of pydantic."""
    with pytest.raises(UsageError, match=r"brokers on this machine.*found broker\.example:9092; use --config"):
        cluster_of(None, "broker.example:9092")


def test_exactly_one_cluster_is_required(tmp_path: Path) -> None:
    config = write(tmp_path, "{jsonl: {path: a.jsonl}}")
    with pytest.raises(UsageError, match="add --config FILE or --bootstrap-servers HOST:PORT"):
        cluster_of(None, None)
    with pytest.raises(UsageError, match="keep one"):
        cluster_of(config, "localhost:9092")
    with pytest.raises(UsageError, match=r"has no source\.kafka"):
        cluster_of(config, None)
