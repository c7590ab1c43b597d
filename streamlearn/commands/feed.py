"""The feed command: the lines of a JSONL file as records of a Kafka topic."""

from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from connectors.kafka.feed import feed
from connectors.lines import read_lines
from streamlearn.errors import UsageError
from streamlearn.settings import KafkaSettings, load


def cluster_of(config: Path | None, bootstrap_servers: str | None) -> KafkaSettings:
    """The cluster to write to, from a configuration file or from broker addresses.

    Raises:
        UsageError: none or both were given, a broker is not on this machine, or there is no source.kafka.
        ConfigError: the configuration cannot be used.
    """
    if config is None and bootstrap_servers is None:
        raise UsageError("feed needs a cluster to write to: add --config FILE or --bootstrap-servers HOST:PORT")
    if config is not None and bootstrap_servers is not None:
        raise UsageError("--config and --bootstrap-servers both name a cluster: keep one")
    if config is None:
        try:
            return KafkaSettings(bootstrap_servers=bootstrap_servers, topics=("unused",), security_protocol="PLAINTEXT")
        except ValidationError as error:
            raise UsageError(
                f"--bootstrap-servers: expected brokers on this machine, since it connects without TLS, found "
                f"{bootstrap_servers}; use --config FILE for any other cluster"
            ) from error
    kafka = load(config).source.kafka
    if kafka is None:
        raise UsageError(f"{config} has no source.kafka, but feed writes to a Kafka topic: add --bootstrap-servers")
    return kafka


def send_file(file: Path, topic: str, cluster: KafkaSettings, *, console: Console) -> int:
    """Send every line, with a progress bar on `console`, and return the number of acknowledged records.

    Raises:
        SourceError: the file or the cluster cannot be used.
    """
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{file.name} to {topic}", total=sum(1 for _ in read_lines(file)))
        return feed(cluster, topic, read_lines(file), report=lambda sent: progress.update(task, completed=sent))
