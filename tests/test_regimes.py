"""Shifts through the whole loop: found, probed, entered, and the same after a death anywhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor

from streamlearn import adaptation as adaptation_module
from streamlearn.assembly import Rooms
from streamlearn.consolidate.consolidator import Consolidator
from streamlearn.daemon import Daemon
from streamlearn.serve.jobs import JobQueue
from streamlearn.serve.status import Board, Clock, Phase, Status
from streamlearn.settings import Settings
from tests.doubles import tiny_backbone

PER_TASK = 90
TASKS = {
    "animals": ("the fox and the dog met number {} in the", " forest"),
    "sums": ("add {0} to {0} and say what it is:", " a sum"),
    "cities": ("What is the capital? France has {} towns. Paris?", " Paris"),
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def stream(*tasks: str, per_task: int = PER_TASK, meta: str = "m") -> list[bytes]:
    """Records of one task after another; a task that comes twice goes on counting."""
    rows = []
    for number, task in enumerate(tasks):
        prompt, completion = TASKS[task]
        for i in range(per_task):
            value = {"prompt": prompt.format(1000 + (4321 * number + 7919 * i) % 9000), "completion": completion}
            rows.append(orjson.dumps({**value, "meta": {meta: i}}))
    return rows


@pytest.fixture
def make(tmp_path: Path, backbone: Path) -> Callable[..., Settings]:
    def build(lines: list[bytes], name: str = "run", **sections: Any) -> Settings:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "stream.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        values: dict[str, Any] = {
            "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 4},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "learner": {"lr": 1e-2},
            "probe": {"warmup_tokens": 300},
            "snapshot": {"every_records": 40},
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        source = {"jsonl": {"path": folder / "stream.jsonl"}}
        return Settings.model_validate({"state": folder / "state", "source": source, **values})

    return build


@contextmanager
def opened(settings: Settings) -> Iterator[Rooms]:
    rooms = Rooms(settings)
    try:
        yield rooms
    finally:
        rooms.close()


def daemon_of(rooms: Rooms) -> Daemon:
    return Daemon(rooms, Board(Status(Phase.STARTING), Clock()), JobQueue(1))


def run(settings: Settings) -> tuple[dict[str, Tensor], Rooms]:
    """Learn to the end; every tensor that the next step would depend on."""
    with opened(settings) as rooms:
        daemon_of(rooms).run()
        weights = {f"{bank.name}.{n}": p for bank in rooms.learner.banks for n, p in (("A", bank.A), ("B", bank.B))}
        state = {**rooms.learner.state(), **rooms.adaptation.state(), **weights}
        return {name: tensor.detach().clone() for name, tensor in state.items()}, rooms


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def test_regimes_are_found_entered_and_recognised(make: Callable[..., Settings]) -> None:
    """Three tasks and the return of the first: three new regimes, one known, each from its first record on."""
    _, rooms = run(make(stream("animals", "sums", "cities", "animals")))
    entries = list(rooms.adaptation.entries)
    assert [(e.shift.regime, e.shift.known) for e in entries] == [(1, False), (2, False), (3, False), (1, True)]
    assert [e.shift.onset for e in entries] == [1, PER_TASK + 1, 2 * PER_TASK + 1, 3 * PER_TASK + 1]
    assert [bool(e.probe_tokens) for e in entries] == [False, True, True, False]
    assert rooms.adaptation.current == 0


def test_every_record_is_trained_once_or_kept_out_once(make: Callable[..., Settings]) -> None:
    """Buffering for a probe loses nothing and repeats nothing."""
    _, rooms = run(make(stream("animals", "sums")))
    ((_, _, trained, dead, held_out),) = rooms.state.ledger.rows()
    assert (trained + held_out, dead) == (2 * PER_TASK, 0)
    assert held_out == 2 * (PER_TASK // 20)
    assert [len(rooms.adaptation.holdouts.examples(slot)) for slot in (0, 1)] == [PER_TASK // 20] * 2


def test_a_new_regime_leaves_the_experts_of_the_old_alone(make: Callable[..., Settings]) -> None:
    """Claims: what the second regime trains, no token of the first passes through."""
    _, rooms = run(make(stream("animals", "sums")))
    for bank in rooms.learner.banks:
        assert bank.bias_HKN is not None
        first, second = (bank.bias_HKN[:, :, slot] == 0 for slot in (0, 1))
        assert first.sum(1).tolist() == second.sum(1).tolist() == [1] * 4
        assert not (first & second).any()
        untouched = ~(first | second)
        assert not bank.B[untouched].any()
        assert bank.B[first].any()
        assert bank.B[second].any()


@pytest.mark.parametrize("where", ["probe", "close", "open"])
@pytest.mark.parametrize("preset", ["streamlearn", "cp-moe"])
def test_a_death_at_a_shift_changes_no_bit(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, where: str, preset: str
) -> None:
    """Killed while a regime is probed, closed or opened, and continued: every tensor is that of the straight run."""
    transient = {"importance": "transient"} if preset == "cp-moe" else {}
    shape = {"adapter": {"preset": preset, "num_heads": 1 if preset == "cp-moe" else 4}, "consolidate": transient}
    lines = stream("animals", "sums", "cities")
    whole, _ = run(make(lines, "whole", **shape))
    settings = make(lines, "killed", **shape)
    deaths = []

    def dying(really: Callable[..., Any]) -> Callable[..., Any]:
        def die_twice(*args: Any, **kwargs: Any) -> Any:
            result = really(*args, **kwargs)  # what it did is lost with the process
            if len(deaths) < 2:
                deaths.append(where)
                raise KeyboardInterrupt
            return result

        return die_twice

    if where == "probe":
        monkeypatch.setattr(adaptation_module, "probe", dying(adaptation_module.probe))
    else:
        monkeypatch.setattr(Consolidator, where, dying(getattr(Consolidator, where)))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    state, rooms = run(settings)
    assert differences(whole, state) == []
    assert rooms.state.records == len(lines)


def test_scrambling_meta_changes_no_bit(make: Callable[..., Settings]) -> None:
    """Nothing that learns reads a record's `meta`."""
    tasks = ("animals", "sums")
    plain, _ = run(make(stream(*tasks), "plain"))
    scrambled, _ = run(make(stream(*tasks, meta="another"), "scrambled"))
    assert differences(plain, scrambled) == []


def test_without_detection_the_stream_is_one_regime(make: Callable[..., Settings]) -> None:
    """`shift.enabled: false` declares the first regime and no other."""
    _, rooms = run(make(stream("animals", "sums"), shift={"enabled": False}))
    assert [e.shift.regime for e in rooms.adaptation.entries] == [1]


def test_a_request_is_routed_by_the_regime_that_it_resembles(make: Callable[..., Settings]) -> None:
    """Single inputs find their regime without a stretch to stand in."""
    lines = stream("animals", "sums")
    _, rooms = run(make(lines))
    values = [orjson.loads(line) for line in (lines[3], lines[PER_TASK + 3], lines[5])]
    inputs = [rooms.decoder.prompt(value["prompt"]) for value in values]
    assert rooms.adaptation.slots_of([torch.tensor(ids, dtype=torch.int32).numpy() for ids in inputs]) == [0, 1, 0]
