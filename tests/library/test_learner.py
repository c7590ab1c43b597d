"""`Learner`: what it learns is what the daemon learns, and nothing of it is heard unless asked for."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import orjson
import pytest
import structlog
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import streamlearn
from benchmarks.daemon import without_http
from streamlearn import Learner, Update
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import ConfigError, SnapshotError, SourceError, StateLockedError, UsageError
from streamlearn.jobs.queue import ExampleError
from streamlearn.settings import Settings
from streamlearn.status import UnknownRegimeError
from tests.learners import regime_tensors, snapshot

PER_BATCH = 4
OPTIONS: dict[str, Any] = {
    "stream": {"max_tokens": 32, "batch_tokens": 32 * PER_BATCH, "batch_records": PER_BATCH},
    "backbone": {"dtype": "float32"},
    "adapter": {"num_heads": 4},
    "learner": {"lr": 1e-2},
    "holdout": {"every_records": 8, "time_share": 0.0},
    "progress": False,
}
Make = Callable[..., Learner]


@pytest.fixture
def make(tiny: Path) -> Iterator[Make]:
    """A learner on the tiny backbone; it is closed after the test."""
    made: list[Learner] = []

    def build(**changes: Any) -> Learner:
        made.append(Learner(tiny, **{**OPTIONS, **changes}))
        return made[-1]

    yield build
    for learner in made:
        learner.close()


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Distinct usable records."""
    return [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(first, first + count)]


def everything(learner: Learner) -> dict[str, Tensor]:
    """All that the next step depends on; a copy."""
    return tensors_of(learner._components)


def tensors_of(components: Components) -> dict[str, Tensor]:
    regimes = {name: tensor.clone() for name, tensor in regime_tensors(components.adaptation).items()}
    return {**snapshot(components.learner), **regimes}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing


def test_it_learns_from_any_iterable(make: Make) -> None:
    """A generator, and a data set that is streamed; each update tells what was learned."""
    learner = make()
    updates = list(learner.learn(row for row in rows(10)))
    assert [update.step for update in updates] == [1, 2, 3]
    assert [update.records for update in updates] == [4, 4, 2]
    assert {update.regime for update in updates} == {1}
    assert updates[0].shift is None
    assert all(update.loss is not None and update.tokens > 0 for update in updates)
    more = datasets.IterableDataset.from_generator(lambda: iter(rows(6, first=10)))
    assert sum(update.records for update in learner.learn(more)) == 6
    assert learner.records == learner.regimes[0].records == 16
    assert [row["records"] for row in learner.history.rows] == [4, 4, 2, 4, 2]
    assert list(learner.history.to_pandas()["step"]) == [1, 2, 3, 4, 5]


def test_a_loop_that_is_left_goes_on_in_the_next_call(make: Make) -> None:
    """What was read ahead is kept, so it makes no difference."""
    whole, parts = make(), make()
    list(whole.learn(rows(100)))
    stream = iter(rows(100))
    assert len(list(islice(parts.learn(stream), 2))) == 2
    list(parts.learn(stream))
    assert_equal(everything(parts), everything(whole))


def test_a_saved_run_goes_on_bit_for_bit(make: Make, tmp_path: Path) -> None:
    """Opened again by its folder alone, with the settings that it was made with."""
    whole, first = make(), make(state=tmp_path / "run")
    list(whole.learn(rows(30)))
    list(whole.learn(rows(30, first=30)))
    list(first.learn(rows(30)))
    first.close()
    with Learner.open(tmp_path / "run", progress=False) as second:
        assert second.records == 30
        list(second.learn(rows(30, first=second.records)))
        assert_equal(everything(second), everything(whole))


def in_file(path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return {"jsonl": {"path": path}}


def daemon_of(tiny: Path, state: Path, source: dict[str, Any]) -> Components:
    options = {**OPTIONS, "backbone": {**OPTIONS["backbone"], "model": str(tiny)}}
    del options["progress"]
    return Components(Settings.model_validate({**options, "state": state, "source": source}))


def test_the_daemon_goes_on_with_its_snapshot(make: Make, tiny: Path, tmp_path: Path) -> None:
    """With a file where there was an iterable."""
    whole, first = make(), make(state=tmp_path / "run")
    list(whole.learn(rows(30)))
    list(whole.learn(rows(30, first=30)))
    list(first.learn(rows(30)))
    first.close()
    source = in_file(tmp_path / "more.jsonl", rows(30, first=30))
    with closing(daemon_of(tiny, tmp_path / "run", source)) as components:
        Daemon(components, *without_http()).run()
        assert_equal(tensors_of(components), everything(whole))


def test_it_goes_on_with_the_daemons_snapshot(make: Make, tiny: Path, tmp_path: Path) -> None:
    """By its state folder."""
    source = in_file(tmp_path / "first.jsonl", rows(30))
    with closing(daemon_of(tiny, tmp_path / "run", source)) as components:
        Daemon(components, *without_http()).run()
    whole = make()
    list(whole.learn(rows(30)))
    list(whole.learn(rows(30, first=30)))
    with Learner.open(tmp_path / "run", progress=False) as second:
        list(second.learn(rows(30, first=30)))
        assert_equal(everything(second), everything(whole))


def test_it_reads_what_the_daemon_reads(make: Make, tiny: Path, tmp_path: Path) -> None:
    """From a configured source, stopped in the middle of a stream that the daemon then ends."""
    source = in_file(tmp_path / "all.jsonl", rows(60))
    with closing(daemon_of(tiny, tmp_path / "whole", source)) as components:
        Daemon(components, *without_http()).run()
        uninterrupted = tensors_of(components)
    learner = make(state=tmp_path / "run", source=source)
    assert len(list(islice(learner.learn(), 5))) == 5
    learner.save()
    learner.close()
    with closing(daemon_of(tiny, tmp_path / "run", source)) as components:
        Daemon(components, *without_http()).run()
        assert_equal(tensors_of(components), uninterrupted)


def test_a_model_that_is_loaded_already(make: Make, tiny: Path) -> None:
    """It learns what the same model learns by its folder."""
    by_name = make()
    list(by_name.learn(rows(10)))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    adopted = Learner(model, tokenizer=AutoTokenizer.from_pretrained(tiny), **OPTIONS)
    with adopted:
        list(adopted.learn(rows(10)))
        assert_equal(everything(adopted), everything(by_name))
        assert adopted.peft_model.get_base_model() is model


def test_a_run_of_a_loaded_model_asks_for_the_model_again(make: Make, tiny: Path, tmp_path: Path) -> None:
    """A snapshot does not hold it, and no setting names it, so neither a folder nor a daemon's settings replace it."""

    def adopted(state: Path) -> Learner:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        return Learner(model, tokenizer=AutoTokenizer.from_pretrained(tiny), state=state, **OPTIONS)

    loaded, named = tmp_path / "loaded", tmp_path / "named"
    with adopted(loaded) as learner:
        list(learner.learn(rows(8)))
    again = r"pass the model again: Learner\(model, tokenizer=tokenizer, state=FOLDER\)"
    with pytest.raises(ConfigError, match=again):
        Learner.open(loaded)
    with pytest.raises(ConfigError, match=again):
        make(state=loaded)
    with pytest.raises(ConfigError, match=again):
        daemon_of(tiny, loaded, in_file(tmp_path / "more.jsonl", rows(8)))
    with adopted(loaded) as learner:
        assert learner.records == 8
    make(state=named).close()
    with pytest.raises(ConfigError, match=rf"pass the model again: Learner\('{tiny}', state=FOLDER\)"):
        adopted(named)


def test_it_answers(make: Make, tmp_path: Path) -> None:
    """By the regime of the prompt, by another, or by the backbone; scores by regime; a LoRA that PEFT loads."""
    learner = make()
    list(learner.learn(rows(24)))
    route = learner.route("say 3")
    assert (route.regime, route.known, route.answered_by) == (1, True, "regime")
    assert learner.generate("say 3", max_new_tokens=4) == learner.generate("say 3", max_new_tokens=4, regime=1)
    assert isinstance(learner.generate("say 3", max_new_tokens=4, backbone=True), str)
    scores = learner.evaluate(rows(6), generate=True, max_new_tokens=4)
    assert scores.examples == 6
    assert scores.score is not None
    assert sum(part.examples for part in scores.by_regime.values()) == 6
    [folder] = learner.export(tmp_path / "out", regime=1)
    assert (folder / "adapter_config.json").is_file()


def test_what_is_learned_can_be_evaluated(make: Make) -> None:
    """NumPy's arrays and tuples as the lists that they are in JSON."""
    learner, lists = make(), [{"input_ids": [5, 6, 7, 8]}]
    same: list[dict[str, Any]] = [{"input_ids": np.arange(5, 9)}, {"input_ids": (5, 6, 7, 8)}]
    assert sum(update.records for update in learner.learn(same)) == 2
    assert [learner.evaluate([record]) for record in same] == [learner.evaluate(lists)] * 2


def test_callbacks_hear_of_every_update(make: Make) -> None:
    """A `TrainerCallback` that logs; it may end the loop."""

    class Logger(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append((state.global_step, logs["loss"]))
            control.should_training_stop = state.global_step == 2

    seen: list[tuple[int, float]] = []
    updates: list[Update] = list(make(callbacks=[Logger()]).learn(rows(20)))
    assert seen == [(update.step, update.loss) for update in updates]
    assert len(updates) == 2


def test_a_record_that_cannot_be_used_is_warned_of(make: Make) -> None:
    """The rest is learned."""
    structlog.reset_defaults()
    learner = make()
    with pytest.warns(RuntimeWarning, match=r"record dead lettered: .*offset=1"):
        assert sum(update.records for update in learner.learn([rows(1)[0], {"other": 1}, *rows(4)])) == 5


@pytest.mark.parametrize(
    ("records", "sizes"),
    [
        ([{"other": 1}], []),
        ([*rows(2 * PER_BATCH), {"other": 1}], [PER_BATCH, PER_BATCH]),
        ([*rows(PER_BATCH), {**rows(1)[0], "label": False}], [PER_BATCH]),
    ],
)
@pytest.mark.filterwarnings("ignore:record dead lettered:RuntimeWarning")
def test_a_rest_without_a_usable_record_yields_no_update(
    make: Make, tmp_path: Path, records: list[dict[str, Any]], sizes: list[int]
) -> None:
    """Dead letters or ignored records alone; the records before them are scored, and all of them are saved."""
    structlog.reset_defaults()
    options = {"records": {"label_false": "ignore"}, "holdout": {"every_records": 2, "time_share": 0.0}}
    learner = make(state=tmp_path / "run", **options)
    assert [update.records for update in learner.learn(records)] == sizes
    assert all(regime.accuracy is not None for regime in learner.regimes)
    learner.close()
    with Learner.open(tmp_path / "run", progress=False) as opened:
        assert opened.records == len(records)


def failing(count: int) -> Iterator[dict[str, Any]]:
    yield from rows(count)
    raise OSError("the file is gone")


def test_an_error_of_the_iterable_loses_no_record(make: Make) -> None:
    """What came before it is learned with what comes in the next call."""
    whole, parts = make(), make()
    list(whole.learn(rows(20)))
    with pytest.raises(OSError, match="the file is gone"):
        list(parts.learn(failing(6)))
    list(parts.learn(rows(14, first=6)))
    assert_equal(everything(parts), everything(whole))


def test_the_error_of_an_iterable_that_was_left_is_not_raised_for_another(make: Make) -> None:
    """The next call learns what was read of it, then its own records, and nothing is left for a third."""
    whole, parts = make(), make()
    list(whole.learn(rows(40)))
    next(parts.learn(failing(30)))
    list(parts.learn(rows(10, first=30)))
    assert_equal(everything(parts), everything(whole))
    assert list(parts.learn([])) == []


def test_an_iterator_that_is_read_on_raises_its_error(make: Make) -> None:
    """It must not look as if its records had ended."""
    learner, stream = make(), failing(30)
    next(learner.learn(stream))
    with pytest.raises(OSError, match="the file is gone"):
        list(learner.learn(stream))


def test_a_loop_is_refused_once_another_one_reads(make: Make) -> None:
    """It would end without its unread records; they are still in its iterable."""
    learner, stream = make(), iter(rows(100))
    loop = learner.learn(stream)
    next(loop)
    list(learner.learn(rows(4, first=100)))
    with pytest.raises(UsageError, match="another call of learn"):
        next(loop)
    list(learner.learn(stream))
    assert learner.records == 104


def test_a_rollback_never_skips_records_of_an_iterable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates that are not finite go back to the snapshot, and what was read since cannot be read again."""
    learner = make()
    stream = learner.learn(rows(40))
    next(stream)
    monkeypatch.setattr(type(learner._components.learner), "_clip", lambda _: torch.tensor(torch.nan))
    with pytest.raises(SourceError, match=r"the records from 0 on must be read again"):
        list(stream)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (UsageError, r"record 1 must be a dict of fields, found str", lambda it: list(it.learn([rows(1)[0], "text"]))),
        (UsageError, r"record 0 must hold what JSON can", lambda it: list(it.learn([{"text": object()}]))),
        (UsageError, r"must be given records, or the learner a setting `source`", lambda it: list(it.learn())),
        (UsageError, r"at least one example, found none", lambda it: it.evaluate([])),
        (UsageError, r"example 0 must be a dict of fields, found NoneType", lambda it: it.evaluate([None])),
        (
            UsageError,
            r"example 1 must be a dict of fields, found tuple",
            lambda it: it.evaluate([*rows(1), ("a", "b")]),
        ),
        (UsageError, r"example 0 must hold what JSON can", lambda it: it.evaluate([{"text": object()}])),
        (ExampleError, r"examples\[0\] is unusable", lambda it: it.evaluate([{"other": 1}])),
        (TypeError, r"an iterable of records, found dict; put a single", lambda it: it.evaluate(rows(1)[0])),
        (TypeError, r"an iterable of records, found dict; put a single", lambda it: list(it.learn(rows(1)[0]))),
        (TypeError, r"an iterable of records, found str", lambda it: list(it.learn("records.jsonl"))),
        (TypeError, r"'int' object is not iterable", lambda it: it.evaluate(5)),
        (TypeError, r"a text or a list of messages, found dict", lambda it: it.generate({"role": "user"})),
        (TypeError, r"a text or a list of messages, found NoneType", lambda it: it.route(None)),
        (TypeError, r"stop: must be a list of strings, found the string", lambda it: it.generate("a", stop="end")),
        (UsageError, r"must have a folder to save to", lambda it: it.save()),
        (UsageError, r"a regime or backbone=True", lambda it: it.generate("a", regime=1, backbone=True)),
        (UnknownRegimeError, r"regime 7 cannot answer", lambda it: it.generate("a", regime=7)),
    ],
)
def test_what_cannot_work_is_refused(
    make: Make, error: type[Exception], match: str, call: Callable[[Learner], object]
) -> None:
    """With what was found and what to do."""
    with pytest.raises(error, match=match):
        call(make())


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("learn", lambda it: list(it.learn(rows(1)))),
        ("route", lambda it: it.route("a")),
        ("generate", lambda it: it.generate("a")),
        ("evaluate", lambda it: it.evaluate(rows(1))),
        ("export", lambda it: it.export("out")),
        ("save", lambda it: it.save()),
    ],
)
def test_a_closed_learner_says_so(make: Make, tmp_path: Path, method: str, call: Callable[[Learner], object]) -> None:
    """Every method; what was learned can still be looked at."""
    learner = make(state=tmp_path / "run")
    list(learner.learn(rows(8)))
    learner.close()
    with pytest.raises(UsageError, match=f"^{method}: the learner must be open, found it closed"):
        call(learner)
    assert learner.records == learner.regimes[0].records == 8
    assert len(learner.shifts) == 1
    assert len(learner.history.rows) == 2


def test_a_loop_whose_learner_is_closed_says_so(make: Make) -> None:
    """Before the next batch, of which only a part could be done."""
    learner = make()
    loop = learner.learn(rows(100))
    next(loop)
    learner.close()
    with pytest.raises(UsageError, match="found it closed"):
        next(loop)


def test_settings_are_checked_as_in_a_configuration_file(make: Make, tiny: Path, tmp_path: Path) -> None:
    """The same messages, before the model is loaded."""
    with pytest.raises(ConfigError, match=r"learner\.rate: unknown key"):
        make(learner={"rate": 1})
    with pytest.raises(ConfigError, match=r"tokenizer: must be given with a model that is loaded already"):
        make(tokenizer=object())
    with pytest.raises(ConfigError, match=r"no-such-model: must be a folder"):
        Learner("no-such-model")
    with pytest.raises(SnapshotError, match=r"found no snapshot in it"):
        Learner.open(tmp_path)
    make(state=tmp_path / "run")
    with pytest.raises(StateLockedError):
        make(state=tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": object(), "tokenizer": object()}, r"^model: must be .* a causal language model .*, found object"),
        ({"model": torch.nn.Linear(1, 1), "tokenizer": object()}, r"^model: must be .*, found Linear"),
        ({"model": None}, r"^model: must be .*, found NoneType"),
        ({"backbone": "float32"}, r"^backbone: expected a mapping of keys to values, found str"),
        ({"adapter": [4]}, r"^adapter: expected a mapping of keys to values, found list"),
    ],
)
def test_an_argument_of_another_type_is_named(tiny: Path, arguments: dict[str, Any], match: str) -> None:
    """With what was expected and what was found."""
    with pytest.raises(ConfigError, match=match):
        Learner(**{"model": tiny, **OPTIONS, **arguments})


def test_a_loaded_model_must_compute_logits_and_come_with_its_tokenizer(tiny: Path) -> None:
    """A decoder without its head is no language model."""
    with pytest.raises(ConfigError, match=r"^model: must be "):
        Learner(AutoModel.from_pretrained(tiny), tokenizer=AutoTokenizer.from_pretrained(tiny), **OPTIONS)
    with pytest.raises(ConfigError, match=r"^tokenizer: must be given .* found none"):
        Learner(AutoModelForCausalLM.from_pretrained(tiny), **OPTIONS)


def test_a_section_that_is_none_is_empty(make: Make) -> None:
    """As in a configuration file."""
    sections = dict.fromkeys(["backbone", "adapter", "learner", "stream"])
    assert make(**sections).settings.backbone == make(backbone={}).settings.backbone


QUIET = """
import time
began = time.perf_counter()
import streamlearn
seconds = time.perf_counter() - began
import sys, warnings
warnings.simplefilter("error")
before = set(sys.modules)
from streamlearn import Learner
with Learner(sys.argv[1], backbone={"dtype": "float32"}, adapter={"num_heads": 4}) as learner:
    for update in learner.learn({"prompt": f"say {i}", "completion": f" {i}"} for i in range(20)):
        pass
    learner.generate("say 3", max_new_tokens=2)
assert "structlog" not in before and "torch" not in before and "numpy" not in before
sys.stderr.write(f"{seconds}")
"""


def test_it_is_silent(tiny: Path) -> None:
    """Neither output stream, and no warning; the import loads nothing heavy."""
    done = subprocess.run([sys.executable, "-c", QUIET, tiny], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    float(done.stderr)


def test_the_public_names() -> None:
    """`__all__` is all of them, and each says what it is."""
    assert streamlearn.__all__ == ["DriftMonitor", "Evaluation", "Learner", "Regime", "Scores", "Update", "__version__"]
    assert all(getattr(streamlearn, name).__doc__ for name in streamlearn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lerner'"):
        streamlearn.Lerner  # noqa: B018
