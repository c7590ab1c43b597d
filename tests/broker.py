"""A real Apache Kafka for tests: one node in a temporary folder, controlled from Python."""

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from streamlearn.settings import KafkaSettings

with warnings.catch_warnings():
    # kafka-python 3.0 loads its schemas by importlib.resources.read_text, which Python 3.11 and 3.12 deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
    from kafka.structs import TopicPartition

USER, PASSWORD = "streamlearn", "correct-horse"

_START_TIMEOUT_S = 240.0  # 5 s on two idle cores
_STOP_TIMEOUT_S = 30.0


class Broker:
    """One Kafka process and its log folder. `kill` and `start` simulate a crash: acknowledged records survive."""

    listeners: Sequence[str] = ("PLAINTEXT", "CONTROLLER", "SASL_PLAINTEXT")
    """Each is named after its protocol and has its own port."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._home = home
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._topics = 0
        self._log = folder / "server.log"
        self._addresses = {
            name: f"127.0.0.1:{port}"
            for name, port in zip(self.listeners, free_ports(len(self.listeners)), strict=True)
        }
        self.servers = self._addresses["PLAINTEXT"]
        self._configure()

    # --- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start and wait until it accepts requests."""
        assert self._process is None, "already running"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._home / "bin" / "kafka-server-start.sh", self._folder / "server.properties"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while b"Kafka Server started" not in self._log.read_bytes():
            alive = self._process.poll() is None
            assert alive, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Shut down cleanly."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process at once, like a crash."""
        self._end(signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend the process: connections stay open, the system accepts new ones, and no request is answered."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def flip_byte(self, topic: str, marker: bytes, partition: int = 0) -> None:
        """Damage the log on disk at `marker`; the broker sends it without a check."""
        for segment in (self._folder / "logs" / f"{topic}-{partition}").glob("*.log"):
            with segment.open("r+b") as log:
                start = log.read().index(marker)
                log.seek(start)
                log.write(bytes([marker[0] ^ 0x01]))

    # --- topics and records -------------------------------------------------------------------------------------------

    def new_topic(self, *, partitions: int = 1, **configs: str) -> str:
        """Create a topic with a unique name; underscores in the names of `configs` stand for dots."""
        self._topics += 1
        name = f"topic{self._topics}"
        self.create_topic(name, partitions=partitions, **configs)
        return name

    def create_topic(self, name: str, *, partitions: int = 1, **configs: str) -> None:
        """Create a topic and wait for its leaders."""
        options = {"num_partitions": partitions, "replication_factor": 1, "configs": _dotted(configs)}
        with self._admin() as admin:
            admin.create_topics({name: options}, wait_for_metadata=True)

    def add_partitions(self, topic: str, total: int) -> None:
        """Grow a topic to `total` partitions and wait for their leaders."""
        with self._admin() as admin:
            admin.create_partitions({topic: total})
            while len(admin.describe_topics([topic])[0]["partitions"]) < total:
                time.sleep(0.05)
            admin.wait_for_topics([topic])

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and wait until it is gone."""
        with self._admin() as admin:
            admin.delete_topics([topic])
            while topic in admin.list_topics():
                time.sleep(0.05)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete every record below the offset `before`, like retention does."""
        with self._admin() as admin:
            admin.delete_records({TopicPartition(topic, partition): before})

    def produce(self, topic: str, values: Sequence[bytes | None], partition: int = 0, **options: Any) -> None:
        """Append raw values as one batch and wait for the acknowledgements; `options` go to each send (key, headers).

        Without a linger the sender's thread may take the first value before the others are there.
        """
        with contextlib.closing(KafkaProducer(bootstrap_servers=self.servers, linger_ms=60_000)) as producer:
            sent = [producer.send(topic, value, partition=partition, **options) for value in values]
            producer.flush(timeout=30)
            for future in sent:
                future.get(timeout=30)

    def produce_compressed(self, topic: str, codec: str, value: bytes) -> None:
        """Append one value as its own batch, compressed with `codec`."""
        options = {"compression_type": codec, "max_request_size": len(value) + 1024}
        with contextlib.closing(KafkaProducer(bootstrap_servers=self.servers, **options)) as producer:
            producer.send(topic, value).get(timeout=30)

    def transact(self, topic: str, values: Sequence[bytes], *, commit: bool, partition: int = 0) -> None:
        """Append values in one transaction and commit or abort it; the marker has its own offset."""
        options = {"transactional_id": f"test-{topic}"}
        with contextlib.closing(KafkaProducer(bootstrap_servers=self.servers, **options)) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for value in values:
                producer.send(topic, value, partition=partition)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()

    def read_all(self, topic: str) -> list[Any]:
        """Return every message of a topic by partition and offset, as kafka-python's type."""
        consumer = KafkaConsumer(
            bootstrap_servers=self.servers,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            consumer_timeout_ms=1,
        )
        with contextlib.closing(consumer):
            partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
            ends = consumer.end_offsets(partitions)
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            messages: list[Any] = []
            while any(consumer.position(partition) < end for partition, end in ends.items()):
                for batch in consumer.poll(timeout_ms=500).values():
                    messages += batch
        return sorted(messages, key=lambda message: (message.partition, message.offset))

    def committed(self, group: str) -> dict[tuple[str, int], tuple[int, str]]:
        """Return a group's committed offsets and metadata by topic and partition."""
        with self._admin() as admin:
            offsets = admin.list_group_offsets(group)[group]
        return {(at.topic, at.partition): (stored.offset, stored.metadata) for at, stored in offsets.items()}

    def sections(self, topic: str, dead: str) -> dict[str, Any]:
        """Return a daemon's sections for its source and its dead letters."""
        kafka = {
            "bootstrap.servers": self.servers,
            "topics": [topic],
            "group.id": f"group-{topic}-{dead}",
            "security.protocol": "PLAINTEXT",
        }
        return {"source": {"kafka": kafka}, "dead_letters": {"topic": dead}}

    def settings(self, *topics: str, **overrides: Any) -> KafkaSettings:
        """Return settings for this broker."""
        values = {"bootstrap_servers": self.servers, "security_protocol": "PLAINTEXT", "topics": topics, **overrides}
        return KafkaSettings(**values)

    def sasl_settings(self, *topics: str, password_file: Path) -> KafkaSettings:
        """Return settings for the listener that requires a password."""
        return self.settings(
            *topics,
            bootstrap_servers=self._addresses["SASL_PLAINTEXT"],
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_plain_username=USER,
            sasl_plain_password_file=password_file,
        )

    # --- configuration and process ------------------------------------------------------------------------------------

    def _admin(self) -> Any:
        return KafkaAdminClient(bootstrap_servers=self.servers)

    def _properties(self) -> dict[str, str]:
        listeners = {name: f"{name}://{address}" for name, address in self._addresses.items()}
        return {
            "listeners": ",".join(listeners.values()),
            "advertised.listeners": ",".join(url for name, url in listeners.items() if name != "CONTROLLER"),
            "controller.quorum.bootstrap.servers": self._addresses["CONTROLLER"],
            "listener.security.protocol.map": ",".join(
                f"{name}:{'PLAINTEXT' if name == 'CONTROLLER' else name}" for name in listeners
            ),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
            ),
            "log.dirs": str(self._folder / "logs"),
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
        }

    def _users(self) -> list[str]:
        """Options for users when the storage is formatted."""
        return []

    def _configure(self) -> None:
        properties = self._folder / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._properties().items()))
        storage = self._home / "bin" / "kafka-storage.sh"
        subprocess.run(
            [storage, "format", "--standalone", "-t", "4L6g3nShT-eMCtK--X86sw", "-c", properties, *self._users()],
            check=True,
            capture_output=True,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KAFKA_HEAP_OPTS": "-Xms128m -Xmx320m", "LOG_DIR": str(self._folder)}

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, how)
            self._process.wait(_STOP_TIMEOUT_S)
            self._process = None


class FileTopics:
    """Topics that are JSONL files, for the crash campaigns on a machine without Kafka."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._topics = 0

    def new_topic(self) -> str:
        """Return the name of a new topic."""
        self._topics += 1
        return f"topic-{self._topics}.jsonl"

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        """Write the records; an empty one, which is no line, becomes an object without keys."""
        (self._folder / topic).write_bytes(b"".join((value or b"{}") + b"\n" for value in values))

    def read_all(self, topic: str) -> list[SimpleNamespace]:
        """Return the dead letters in a file, with `headers`."""
        return [SimpleNamespace(**orjson.loads(line)) for line in (self._folder / topic).read_bytes().splitlines()]

    def sections(self, topic: str, dead: str) -> dict[str, Any]:
        """Return a daemon's sections for its source and its dead letters."""
        jsonl = {"path": str(self._folder / topic), "follow": True}
        return {"source": {"jsonl": jsonl}, "dead_letters": {"file": str(self._folder / dead)}}


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the whole session; each test uses its own topics."""
    yield from running(Broker(needed_kafka(), tmp_path_factory.mktemp("kafka")))


def running(kafka: Broker) -> Iterator[Broker]:
    """Start a broker, and kill it after the tests that use it."""
    kafka.start()
    yield kafka
    kafka.kill()


def needed_kafka() -> Path:
    """Return Kafka's folder; skip the test if Kafka or Java is missing."""
    home = kafka_home()
    if home is None:
        pytest.skip("no Apache Kafka: set KAFKA_HOME to an unpacked distribution")
    if shutil.which("java") is None:
        pytest.skip("no java on PATH: Apache Kafka needs Java 17")
    return home


@pytest.fixture
def leaked_sockets() -> Iterator[None]:
    """Collect, without warnings, the sockets that kafka-python leaves to the garbage collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def kafka_home() -> Path | None:
    """Return $KAFKA_HOME, or the Kafka in the shared folder beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "kafka"
    home = Path(os.environ.get("KAFKA_HOME") or beside)
    return home if (home / "bin" / "kafka-server-start.sh").exists() else None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _dotted(configs: dict[str, str]) -> dict[str, str]:
    return {key.replace("_", "."): value for key, value in configs.items()}
