"""Envelopes that Kafka's own producer writes are learned from their topic, without a second job that unwraps them."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from streamlearn.cli.main import app
from tests.broker import Broker, needed_kafka
from tests.end_to_end.process import DaemonProcess, ForkedDaemon, configuration

ROWS = 24
TOMBSTONE = b"NULL"


def conversation(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"Is shop {number} open?"}
    return {"messages": [question, {"role": "assistant", "content": f"Shop {number} is."}]}


def framed(number: int) -> bytes:
    """As Confluent's serializers write it: a zero byte and the schema's id."""
    return b"\x00\x00\x00\x00\x07" + json.dumps(conversation(number)).encode()


def event(number: int) -> bytes:
    """A CloudEvent in structured mode; every third one has its data in base64."""
    data = conversation(number)
    encoded = base64.b64encode(json.dumps(data).encode()).decode()
    content = {"data_base64": encoded} if number % 3 == 0 else {"data": data}
    attributes = {"specversion": "1.0", "type": "ticket.corrected", "source": "/desk", "id": f"e{number}"}
    return json.dumps({**attributes, "datacontenttype": "application/json", **content}).encode()


def change(number: int, op: str) -> bytes:
    """A change as Debezium writes it, every other one with Kafka Connect's schema around it."""
    row = {"id": number, "question": f"Is shop {number} open?", "answer": f"Shop {number} is."}
    before, after = (None if op == "c" else row), (None if op == "d" else row)
    payload = {"before": before, "after": after, "source": {"table": "tickets"}, "op": op, "ts_ms": 1760000000000}
    return json.dumps({"schema": {"type": "struct"}, "payload": payload} if number % 2 else payload).encode()


CHANGES = [value for number in range(ROWS) for value in (*(change(number, op) for op in "cud"), TOMBSTONE)]


class Form(NamedTuple):
    """A topic of envelopes; its last message is the one that cannot be learned."""

    records: dict[str, Any]
    """Section of the configuration."""
    values: list[bytes]
    learned: int
    deleted: int
    sampled: str
    """What `check-config --sample 3` counts."""


FORMS = {
    "confluent": Form(
        {"framing": "confluent"},
        [*map(framed, range(ROWS)), TOMBSTONE, json.dumps(conversation(0)).encode()],
        ROWS,
        1,
        "of 3 records: 3 learned, dead letters: none",
    ),
    "cloudevents": Form(
        {"unwrap": ["data"]},
        [*map(event, range(ROWS)), TOMBSTONE, b'{"specversion": "1.0", "id": "e"}'],
        ROWS,
        1,
        "of 3 records: 3 learned, dead letters: none",
    ),
    "debezium": Form(
        {"unwrap": ["after"], "prompt": "question", "completion": "answer"},
        [*CHANGES, b'{"op": "c", "after": {"id": 1, "question": "Is it open?"}}'],
        2 * ROWS,
        2 * ROWS,
        "of 3 records: 2 learned, 1 deletion, dead letters: none",
    ),
}


def produce(broker: Broker, topic: str, values: list[bytes]) -> None:
    """Write with keys, by the console producer of Apache Kafka."""
    reader = [f"--reader-property={option}" for option in ("parse.key=true", f"null.marker={TOMBSTONE.decode()}")]
    program = str(needed_kafka() / "bin" / "kafka-console-producer.sh")
    lines = b"".join(b"%d\t%s\n" % (key, value) for key, value in enumerate(values))
    command = [program, "--bootstrap-server", broker.servers, "--topic", topic, *reader]
    subprocess.run(command, input=lines, check=True, timeout=180, capture_output=True)


@pytest.mark.broker
@pytest.mark.parametrize("name", FORMS)
def test_a_topic_of_envelopes_is_learned_as_it_is(
    name: str, broker: Broker, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """`check-config --sample` shows what is learned of it; the ledger has every message, deletions by themselves."""
    form, topic, dead = FORMS[name], broker.new_topic(), broker.new_topic()
    produce(broker, topic, form.values)
    config = configuration(broker, topic, dead, Path("builtin:nano"), 8)
    config["stream"]["linger_s"], config["snapshot"] = 0.5, {"every_s": 1.0}
    daemon = ForkedDaemon(tmp_path / "run", {**config, "records": form.records})
    daemons.append(daemon)

    sample = CliRunner().invoke(app, ["check-config", "--config", str(daemon.config), "--sample", "3"])
    assert sample.stdout.splitlines()[-1] == form.sampled
    assert "⟦Shop 0 is.<|" in sample.stdout
    daemon.start()
    position = [[topic, 0, len(form.values)]]
    daemon.wait_until(lambda: daemon.has_snapshot and daemon.newest().manifest["position"] == position, "the end")
    assert daemon.terminate() == 0

    [(_, _, trained, dead_lettered, held_out, ignored)] = daemon.newest().manifest["ledger"]
    assert (trained + held_out, dead_lettered, ignored) == (form.learned, 1, form.deleted)
    assert [message.value for message in broker.read_all(dead)] == [form.values[-1]]
