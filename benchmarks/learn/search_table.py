"""The record of a search: a JSON file with every trial, and a table with one row per method."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from benchmarks.learn.search import Found
from benchmarks.learn.search_trials import BEYOND, LITTLE, LR, Setup, Trial, best

HEAD = """# What the values of each method were chosen from

`streamlearn bench search` made this table and the profile. Every method has the same {trials} trials, each a run on
`{suite}` with {records} records per task and seed {seed}, which no result uses, on {backbone}. Where the best value is
the first or the last of those tried, the next one beyond is tried too, up to {beyond} times; an optimum that is at the
*edge* even then may lie farther out. Scores are AP: the mean over the tasks of the metric of free answers after the
last task, on at most {evaluated} development records per task. No test record was read. The trial with the highest AP
is chosen, of equal ones the one with the lower token loss; *default* is the strength of the method's arm, tried with
every rate.
"""


def write_search(found: Found, table: Path) -> None:
    """Write the table, and beside it the JSON file of the same name."""
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(to_markdown(found), encoding="utf-8")
    data = orjson.dumps(to_json(found), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    table.with_suffix(".json").write_bytes(data)


def to_json(found: Found) -> dict[str, Any]:
    """Return every trial and choice; a failed trial has no scores."""
    return {
        "source": found.profile.source,
        "setup": asdict(found.setup),
        "setups": [
            {**asdict(setup), "trials": [_trial(trial) for trial in trials]} for setup, trials in found.setups.items()
        ],
        "methods": {
            method: {
                "chosen": dict(found.profile.methods.get(method, {})),
                "optimum": optima(trials),
                "trials": [_trial(trial) for trial in trials],
            }
            for method, trials in found.trials.items()
        },
    }


def to_markdown(found: Found) -> str:
    """Return the page."""
    source = found.profile.source
    head = HEAD.format(
        trials=source["trials_per_method"],
        beyond=BEYOND,
        suite=source["suite"],
        records=source["records_per_task"],
        evaluated=source["evaluated_per_task"],
        seed=source["seed"],
        backbone=source["backbone"],
    )
    setups = [
        [setup.prompts, _layers(setup), *(_score(trial) for trial in trials), "chosen" if setup == found.setup else ""]
        for setup, trials in found.setups.items()
    ]
    methods = [_row(method, trials) for method, trials in found.trials.items()]
    tried = [trial.method for trial in next(iter(found.setups.values()))]
    return "\n".join(
        [
            head,
            "## Prompts and layers, the same for all methods",
            "",
            *_table(["prompts", "adapters in", *tried, ""], setups),
            "",
            f"The highest mean of the two scores decides; adapters in the upper half may cost up to {LITTLE:g}.",
            "",
            "## Learning rate and strength of each method",
            "",
            *_table(["method", "learning rate: AP", "strength: AP at the best rate", "chosen", "optimum"], methods),
            "",
            f"Commits of the runs: {', '.join(source['commits']) or 'unknown'}.",
            "",
        ]
    )


def optima(trials: Sequence[Trial]) -> dict[str, str]:
    """Return where the chosen values lie, by key: interior, edge, or default."""
    chosen = best(trials)
    if chosen is None:
        return {}
    strength = _strength(trials)
    places = {LR: _place(chosen.own[LR], (trial.own[LR] for trial in trials))}
    if strength is not None:
        grid = [trial.own[strength] for trial in trials if strength in trial.own]
        places[strength] = _place(chosen.own[strength], grid) if strength in chosen.own else "default"
    return places


def _place(value: float, grid: Iterable[float]) -> str:
    return "interior" if min(known := sorted(grid)) < value < max(known) else "edge"


def _row(method: str, trials: Sequence[Trial]) -> list[str]:
    chosen, strength = best(trials), _strength(trials)
    by_rate = sorted(trials, key=lambda trial: trial.own[LR])
    alone = [trial for trial in by_rate if set(trial.own) == {LR}]
    known = {trial.own[LR] for trial in alone}
    beyond = [trial for trial in by_rate if trial.own[LR] not in known]
    others = sorted(
        (trial for trial in trials if strength in trial.own and trial.own[LR] in known),
        key=lambda trial: trial.own[strength or LR],
    )
    return [
        f"`{method}`",
        ", ".join(
            [
                *(f"{trial.own[LR]:g}: {_score(trial, chosen)}" for trial in alone),
                *(f"{_values(trial.own)}: {_score(trial, chosen)}" for trial in beyond),
            ]
        ),
        f"`{strength}` " + ", ".join(f"{trial.own[strength]:g}: {_score(trial, chosen)}" for trial in others)
        if strength
        else "-",
        _values(chosen.own) if chosen else "failed",
        ", ".join(f"{key}: {place}" for key, place in optima(trials).items()) or "-",
    ]


def _strength(trials: Sequence[Trial]) -> str | None:
    """The key of the strength; None for a method without one."""
    return next((key for trial in trials for key in trial.own if key != LR), None)


def _values(own: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in own.items())


def _score(trial: Trial, chosen: Trial | None = None) -> str:
    if trial.ap is None:
        return "failed"
    text = f"{trial.ap:.3f}".removeprefix("0")
    return f"**{text}**" if trial == chosen else text


def _layers(setup: Setup) -> str:
    return "all layers" if setup.first_layer is None else f"layers {setup.first_layer} and above"


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "method": trial.method,
        "own": dict(trial.own),
        "ap": trial.ap,
        "loss": None if trial.ap is None else trial.loss,
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
