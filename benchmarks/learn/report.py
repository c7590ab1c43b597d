"""Report on a folder of runs, or on a member of the archive of runs: SUITE.json, SUITE.md and a plot of each suite.

Streams that nobody cut have tables of their own, see `natural`.

A row is a method, a table a suite. Runs share a table only if they are equal in what `OF_A_SUITE` lists, and a row only
if they are equal in what `OF_A_ROW` lists. Skill says where a method stands between the best answer that ignores the
input and the ceiling: the best mean AP among methods that do not have to learn continually.
"""

import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from statistics import fmean, stdev
from typing import Any

import orjson

from benchmarks.learn import natural
from benchmarks.learn.bootstrap import FIGURES, Bootstrap, Estimate, of_seed
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.run import FORMAT
from benchmarks.learn.scores import Run, detection_scores, last_segments, scores, skill
from streamlearn.errors import UsageError

Json = Mapping[str, Any]
Condition = Callable[[Run], Any]

BLIND, FROZEN, DEFAULT, PLAIN = "blind", "frozen", "streamlearn", "lora"
CEILINGS = ("lora-per-task", "joint", "joint-3")
CONTROL = "lora-per-regime"
ORDER = tuple(dict.fromkeys((BLIND, FROZEN, *METHODS, *ABLATIONS)))
"""Methods in the order of their rows."""
OF_A_SUITE: Mapping[str, Condition] = {
    "split": lambda run: run["split"],
    "backbone": lambda run: f"{run['backbone']['model']} {run['backbone']['digest']}",
    "profile": lambda run: run["profile"],
    "segments": lambda run: [(segment["tasks"], segment["records"]) for segment in run["segments"]],
    "unseen tasks": lambda run: list(run["unseen"]),
    "tasks with `end_as_after`": lambda run: [
        task for task, own in sorted(run["answers"].items()) if "end_as_after" in own
    ],
    "scored records": lambda run: {
        task: f"{len(answer['end'])} scores of {answer['metric']}" for task, answer in sorted(run["answers"].items())
    },
}
OF_TRAINED: Mapping[str, Condition] = {"dtype": lambda run: run["dtype"], "device": lambda run: run["device"]}
"""What all runs of a suite that use the backbone have in common; `blind` does not use it."""
OF_A_ROW: Mapping[str, Condition] = {"arm": lambda run: run["arm"], "commit": lambda run: run["versions"]["commit"]}
ANSWERS = {
    "AP": ("AP", 3, "score of free answers at the end, mean over tasks"),
    "LA": ("LA", 3, "learning accuracy: score right after a task's last segment, mean over tasks"),
    "AF": ("AF", 3, "average forgetting: drop since a task's last segment; a gain counts as no drop"),
    "BWT": ("BWT", 3, "backward transfer: change since a task's last segment; positive for a gain"),
    "ZST": ("ZST", 3, "zero-shot transfer: score at the end on tasks that were never trained on"),
}
"""Score -> heading, decimals and meaning."""
COSTS = {
    "token_AP": ("token AP", 3, "teacher-forced token accuracy at the end, mean over tasks"),
    "token_loss": ("token loss", 2, "teacher-forced loss at the end, nats per answer token"),
    "FWT": ("FWT", 3, "forward transfer: token accuracy before a task's first record minus that of frozen"),
    "prequential_loss": ("preq.", 2, "prequential loss, of each record before training on it, nats per token"),
    "first_50_loss": ("first 50", 2, "prequential loss over the first 50 records of each segment"),
    "boundaries_found": ("found", 1, "true boundaries detected within 64 records, before the next one"),
    "false_shifts": ("false", 1, "shifts declared without a boundary"),
    "returns_declared": ("returns", 1, "shifts declared to be the return of a known regime"),
    "activated_parameters": ("active", 0, "trained parameters that one token activates"),
    "stored_parameters": ("stored", 0, "trained parameters that are kept"),
    "tokens_per_s": ("tokens/s", 0, "training throughput, without evaluation"),
    "peak_memory_mib": ("MiB", 0, "peak memory of the process"),
}
STATED = ("activated_parameters", "stored_parameters", "tokens_per_s", "peak_memory_mib")
"""What a run states itself."""
EARLIER = ("LA", "AF", "BWT")
"""Scores that need the answers right after a task's last segment."""
DIFFERENCES = ("AP", "BWT", "LA", "ZST")
MARK = " °"
OTHER_RULER = (
    f"{MARK.strip()}: from answers whose texts were not stored, so still by streamlearn's own ROUGE-L instead of "
    "rouge-score; not comparable with AP"
)
INTERVAL = "95 %: interval from a paired bootstrap over test records; it does not cover other training seeds"
SPREAD = "±: standard deviation over seeds; n: number of seeds"
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#007A5A", "#666666"  # Okabe and Ito, green darkened for text
COLORS = {DEFAULT: BLUE, PLAIN: ORANGE, **dict.fromkeys((*CEILINGS, CONTROL), GREEN)}


def report(source: Path, out: Path, member: str = "") -> list[str]:
    """Write the report; return the names of the suites.

    Args:
        source: Folder of runs SUITE/METHOD.SEED.json, or an archive with such folders.
        out: Folder for the report.
        member: Folder within the archive.

    Raises:
        UsageError: there are no runs, or they are not comparable.
    """
    suites = read_runs(source, member)
    out.mkdir(parents=True, exist_ok=True)
    for suite, runs in suites.items():
        if natural.is_uncut(runs[0]):
            about = natural.NaturalReport(runs)
            summary = about.summary()
            text = natural.markdown(summary)
            about.draw(summary, out / f"{suite}.png")
        else:
            summary = summarize(runs)
            text = markdown(summary)
            draw(summary, out)
        (out / f"{suite}.json").write_bytes(
            orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        (out / f"{suite}.md").write_text(text, encoding="utf-8")
    return list(suites)


def read_runs(source: Path, member: str = "") -> dict[str, list[Run]]:
    """Return the runs by suite, in the order of `ORDER` and of their seeds.

    Raises:
        UsageError: there are no runs, one has another format, or the runs of a suite or of a method are not comparable.
    """
    suites: dict[str, list[tuple[str, Run]]] = {}
    for file, content in sorted(_files(source, member)):
        run = orjson.loads(content)
        if run.get("format") != FORMAT:
            raise UsageError(
                f"{file}: expected a run of format {FORMAT}, found {run.get('format')}; `rescore` it or make it again"
            )
        if not run["answers"] and not natural.is_uncut(run):
            raise UsageError(f"{file}: expected scores of free answers, found none; make it again with them")
        suites.setdefault(run["suite"], []).append((file, run))
    if not suites:
        raise UsageError(f"{source}: expected runs {member or '.'}/SUITE/METHOD.SEED.json, found none")
    places = {name: place for place, name in enumerate(ORDER)}
    for group in suites.values():
        group.sort(key=lambda pair: (places.get(pair[1]["method"], len(places)), pair[1]["method"], pair[1]["seed"]))
        _check(group)
    return {suite: [run for _, run in group] for suite, group in suites.items()}


def _files(source: Path, member: str) -> Iterator[tuple[str, bytes]]:
    if not source.exists():
        raise UsageError(f"{source}: expected a folder of runs or an archive of them, found nothing")
    if source.is_dir():
        yield from ((str(file), file.read_bytes()) for file in (source / member).glob("*/*.json"))
        return
    if not tarfile.is_tarfile(source):
        raise UsageError(f"{source}: expected a folder of runs or an archive of them, found another file")
    with tarfile.open(source) as archive:
        for entry in archive:
            path = PurePath(entry.name)
            if entry.isfile() and path.suffix == ".json" and path.parent.parent == PurePath(member):
                content = archive.extractfile(entry)
                assert content is not None
                yield entry.name, content.read()


def _check(group: Sequence[tuple[str, Run]]) -> None:
    _check_equal("one suite", OF_A_SUITE, group)
    _check_equal("one suite", OF_TRAINED, [pair for pair in group if pair[1]["method"] != BLIND])
    rows: dict[str, list[tuple[str, Run]]] = {}
    for file, run in group:
        rows.setdefault(run["method"], []).append((file, run))
    for method, row in rows.items():
        _check_equal(f"method {method}", OF_A_ROW, row)


def _check_equal(of: str, conditions: Mapping[str, Condition], group: Sequence[tuple[str, Run]]) -> None:
    for name, condition in conditions.items():
        for file, run in group:
            first_file, first = group[0]
            if condition(run) != condition(first):
                raise UsageError(
                    f"runs of {of} must be equal in {name}, found {condition(first)} in {first_file} and "
                    f"{condition(run)} in {file}; make one of them again, or report on them from separate folders"
                )


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the summary of one suite's runs, as it is written to SUITE.json."""
    bootstrap = Bootstrap(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    frozen = {run["seed"]: run for run in groups.get(FROZEN, [])}
    figures = {name: _figures(group, frozen) for name, group in groups.items()}
    ap = {name: {run["seed"]: _ap(run) for run in group} for name, group in groups.items()}
    ceiling = max((name for name in CEILINGS if name in ap), key=lambda name: fmean(ap[name].values()), default=None)
    rows = {}
    for name, group in groups.items():
        base = base_of(name) if name in ABLATIONS else DEFAULT
        others = base if name != base else None
        rows[name] = {
            "arm": group[0]["arm"],
            "commit": str(group[0]["versions"]["commit"])[:12],
            "seeds": [run["seed"] for run in group],
            "figures": figures[name],
            "skill": _skill(ap[name], ap[BLIND], ap[ceiling]) if ceiling and BLIND in ap else None,
            "intervals": {figure: _json(bootstrap.estimate(name, figure)) for figure in FIGURES},
            "zero_shot_gain": _json(None if name == FROZEN else bootstrap.difference(name, FROZEN, "ZST")),
            "differences": {f: _json(bootstrap.difference(name, others, f) if others else None) for f in FIGURES},
        }
    shown = dict.fromkeys((BLIND, FROZEN, *([ceiling] if ceiling else []), DEFAULT, PLAIN))
    first = next((run for run in runs if run["dtype"] is not None), runs[0])
    setting = {key: first[key] for key in ("split", "backbone", "profile", "segments", "unseen", "dtype", "device")}
    return {
        "suite": first["suite"],
        "setting": {
            **setting,
            "records_scored": {task: len(answer["end"]) for task, answer in first["answers"].items()},
            "own_rouge_l": any("end_as_after" in answer for answer in first["answers"].values()),
            "torch": sorted({str(run["versions"]["torch"]) for run in runs if run["versions"].get("torch")}),
            "commits": sorted({row["commit"] for row in rows.values()}),
        },
        "skill_scale": {"ceiling": ceiling},
        "methods": {name: row for name, row in rows.items() if name not in ABLATIONS},
        "ablations": {name: {"of": base_of(name), **row} for name, row in rows.items() if name in ABLATIONS},
        "tasks": _tasks(groups, bootstrap, [name for name in shown if name in groups]),
    }


def base_of(ablation: str) -> str:
    """Return the method that an ablation changes: the one that its name starts with, else the default."""
    method, _, _ = ablation.partition(", ")
    return method if method in METHODS else DEFAULT


def _ap(run: Run) -> float:
    ap = scores(run).AP
    assert ap is not None, "`read_runs` refuses runs without answers"
    return ap


def _skill(*by_seed: Mapping[int, float]) -> float | None:
    """Return `skill` of the mean AP of a method, of blind and of the ceiling over the seeds that all three have."""
    common = sorted(set.intersection(*(set(own) for own in by_seed)))
    return skill(*(fmean(own[seed] for seed in common) for own in by_seed)) if common else None


def _figures(group: Sequence[Run], frozen: Mapping[int, Run]) -> dict[str, Any]:
    """Score or cost -> its mean and spread over the seeds; None without values."""
    by_seed = [
        {
            **asdict(scores(run, of_seed(frozen, run["seed"]) if frozen else None)),
            **detection_scores(run),
            **{name: run[name] for name in STATED},
        }
        for run in group
    ]
    return {name: spread([values[name] for values in by_seed]) for name in by_seed[0]}


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean, sample standard deviation (None for one value) and number of the values; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), "sd": stdev(known) if len(known) > 1 else None, "seeds": len(known)}


def _tasks(groups: Mapping[str, Sequence[Run]], bootstrap: Bootstrap, shown: Sequence[str]) -> dict[str, Any]:
    """Scores by task right after its segment and at the end; `low` and `high` are the interval at the end."""
    first = next(iter(groups.values()))[0]
    tasks = {}
    for task in [*last_segments([segment["tasks"] for segment in first["segments"]]), *first["unseen"]]:
        end = bootstrap.of_task(task, shown)
        methods = {}
        for name in shown:
            after = [run["answers"][task]["after"] for run in groups[name]]
            known = name not in (BLIND, FROZEN) and None not in after and "end_as_after" not in first["answers"][task]
            methods[name] = {
                "after": fmean(map(fmean, after)) if known else None,
                "end": end[name].value,
                "low": end[name].low,
                "high": end[name].high,
            }
        answer = first["answers"][task]
        about = {"metric": answer["metric"], "records": len(answer["end"]), "unseen": task in first["unseen"]}
        tasks[task] = {**about, "methods": methods}
    return tasks


def _json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate._asdict()


def markdown(summary: Json) -> str:
    """Format all tables of a suite."""
    setting, unseen = summary["setting"], summary["setting"]["unseen"]
    scored = setting["records_scored"]
    lines = [
        f"# {summary['suite']}",
        "",
        f"{setting['backbone']['model']} with profile {setting['profile']}: {len(setting['segments'])} segments, "
        f"{sum(segment['records'] for segment in setting['segments'])} training records; scored on "
        f"{sum(number for task, number in scored.items() if task not in unseen)} {setting['split']} records of "
        f"{len(scored) - len(unseen)} tasks and {sum(scored[task] for task in unseen)} of tasks never trained on "
        f"({len(unseen)}). {setting['dtype']} on {setting['device']}, torch {', '.join(setting['torch'])}, "
        f"commit {', '.join(setting['commits'])}.",
    ]
    tables = [_answers_table, _differences_table, _costs_table, _tasks_table]
    for table in [*tables, _ablations_table] if summary["ablations"] else tables:
        title, headings, rows, notes = table(summary)
        cells = [headings, ["---"] * len(headings), *rows]
        lines += ["", f"## {title}", "", *("| " + " | ".join(row) + " |" for row in cells), ""]
        lines += [f"- {note}" for note in notes]
        if any(heading.endswith(MARK) for heading in headings):
            lines.append(f"- {OTHER_RULER}")
    return "\n".join(lines) + "\n"


Table = tuple[str, list[str], list[list[str]], list[str]]
"""Title, headings, rows and notes."""


def _answers_table(summary: Json) -> Table:
    methods, ceiling = summary["methods"], summary["skill_scale"]["ceiling"]
    names = _known(ANSWERS, methods)
    others = [_heading(name, summary) for name in names[1:]]
    headings = ["method", "AP", "AP, 95 %", "skill", *others, f"over {FROZEN}", "n"]
    rows = []
    for name, row in methods.items():
        first, *others = (_mean(row["figures"][figure], ANSWERS[figure][1]) for figure in names)
        interval = row["intervals"]["AP"]
        skilled = "-" if row["skill"] is None else f"{row['skill']:.2f}"
        rows.append([
            _label(name, ceiling), first, f"{interval['low']:.3f} to {interval['high']:.3f}", skilled, *others,
            _estimate(row["zero_shot_gain"]), f"{len(row['seeds'])}",
        ])  # fmt: skip
    notes = [f"{ANSWERS[name][0]}: {ANSWERS[name][2]}" for name in names]
    notes.insert(1, "skill: (AP - AP of blind) / (AP of the ceiling - AP of blind), over the seeds that all three have")
    notes.append(f"over {FROZEN}: ZST minus that of the backbone without training, with its 95 % interval")
    return "Answers", headings, rows, [*notes, INTERVAL, SPREAD]


def _differences_table(summary: Json) -> Table:
    rows = [
        [name, *(_estimate(row["differences"][figure]) for figure in DIFFERENCES), _pairs(row)]
        for name, row in summary["methods"].items()
        if any(row["differences"].values())
    ]
    notes = [f"d: method minus {DEFAULT}, on the same seeds and test records", INTERVAL]
    headings = ["method", *(f"d {_heading(figure, summary)}" for figure in DIFFERENCES), "n"]
    return f"Differences from {DEFAULT}", headings, rows, [*notes, "n: number of seeds that both have"]


def _costs_table(summary: Json) -> Table:
    methods = {**summary["methods"], **summary["ablations"]}
    names = _known(COSTS, methods)
    rows = [
        [name, *(_mean(row["figures"][figure], COSTS[figure][1]) for figure in names), row["commit"][:8]]
        for name, row in methods.items()
    ]
    notes = [f"{COSTS[name][0]}: {COSTS[name][2]}" for name in names]
    return "Tokens and costs", ["method", *(COSTS[name][0] for name in names), "commit"], rows, [*notes, SPREAD]


def _tasks_table(summary: Json) -> Table:
    tasks, ceiling = summary["tasks"], summary["skill_scale"]["ceiling"]
    shown = list(next(iter(tasks.values()))["methods"])
    rows = []
    for task, row in tasks.items():
        label = f"{task} (unseen)" if row["unseen"] else task
        cells = [label, row["metric"].replace("_", " "), f"{row['records']}"]
        for name in shown:
            score = row["methods"][name]
            after = "" if score["after"] is None else f"{score['after']:.2f} → "
            cells.append(f"{after}{score['end']:.2f} [{score['low']:.2f}, {score['high']:.2f}]")
        rows.append(cells)
    notes = ["a → b: score right after the task's last segment, and at the end", "[ ]: 95 % interval at the end"]
    return "By task", ["task", "metric", "records", *(_label(name, ceiling) for name in shown)], rows, notes


def _ablations_table(summary: Json) -> Table:
    rows = [
        [name, row["of"], _mean(row["figures"]["AP"], 3), _mean(row["figures"]["AF"], 3)]
        + [_estimate(row["differences"][figure]) for figure in DIFFERENCES]
        + [_pairs(row)]
        for name, row in summary["ablations"].items()
    ]
    differences = [f"d {_heading(figure, summary)}" for figure in DIFFERENCES]
    headings = ["ablation", "of", "AP", _heading("AF", summary), *differences, "n"]
    return "Ablations", headings, rows, ["d: ablation minus the method that it changes", INTERVAL]


def _heading(figure: str, summary: Json) -> str:
    return f"{figure}{MARK}" if figure in EARLIER and summary["setting"]["own_rouge_l"] else figure


def _label(name: str, ceiling: str | None) -> str:
    return f"**{name}**" if name == DEFAULT else f"{name} (ceiling)" if name == ceiling else name


def _mean(figure: Json | None, decimals: int) -> str:
    if figure is None:
        return "-"
    return f"{figure['mean']:,.{decimals}f}" + (f" ± {figure['sd']:,.{decimals}f}" if figure["sd"] else "")


def _estimate(value: Json | None) -> str:
    return "-" if value is None else f"{value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def _known(columns: Mapping[str, Any], rows: Json) -> list[str]:
    """Columns that have a value in some row."""
    return [name for name in columns if any(row["figures"][name] is not None for row in rows.values())]


def _pairs(row: Json) -> str:
    difference = row["differences"]["AP"]
    return "-" if difference is None else f"{difference['seeds']}"


def draw(summary: Json, folder: Path) -> None:
    """Write SUITE-forgetting.png, if some method's forgetting is known.

    It shows the score at the end against backward transfer, a point per method with its 95 % intervals.
    """
    import matplotlib  # noqa: PLC0415 - an extra

    matplotlib.use("Agg")  # draws to files and opens no window
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axis = plt.subplots(figsize=(10, 5.5), layout="constrained")
    if _draw_forgetting(axis, summary):
        axis.set_title(f"{summary['suite']} on {summary['setting']['backbone']['model']}", fontsize=11, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{summary['suite']}-forgetting.png", dpi=100)
    plt.close(figure)


def _draw_forgetting(axis: Any, summary: Json) -> bool:
    methods = {name: row["intervals"] for name, row in summary["methods"].items()}
    points = {name: row for name, row in methods.items() if name not in (BLIND, FROZEN) and row["BWT"] is not None}
    for name, row in points.items():
        AP, BWT = row["AP"], row["BWT"]
        bars = [[[e["value"] - e["low"]], [e["high"] - e["value"]]] for e in (BWT, AP)]
        color = COLORS.get(name, GRAY)
        axis.errorbar(BWT["value"], AP["value"], xerr=bars[0], yerr=bars[1], fmt="o", color=color, elinewidth=0.8)
    for name in (BLIND, FROZEN):
        if name in methods:
            axis.axhline(methods[name]["AP"]["value"], color=GRAY, linestyle="--", linewidth=1, zorder=0, label=name)
            axis.annotate(name, (0.005, methods[name]["AP"]["value"]), xycoords=("axes fraction", "data"), fontsize=8)
    low, high = axis.get_ylim()
    top = high
    for name in sorted(points, key=lambda name: points[name]["AP"]["value"], reverse=True):  # labels do not overlap
        point, color = points[name], COLORS.get(name, GRAY)
        y = min(point["AP"]["value"], top)
        top = y - (high - low) / 32
        axis.annotate(
            f"{name} {point['AP']['value']:.2f}", (point["BWT"]["value"], point["AP"]["value"]), (1.02, y),
            textcoords=axis.get_yaxis_transform(), color=color, fontsize=8.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.4, "shrinkB": 3},
        )  # fmt: skip
    axis.axvline(0, color="0.8", linewidth=1, zorder=0)
    ruler = ", by streamlearn's own ROUGE-L" if summary["setting"]["own_rouge_l"] else ""
    axis.set_xlabel(f"backward transfer: change in score since a task's last segment (left of 0: forgets){ruler}")
    axis.set_ylabel("AP: score of free answers at the end, mean over tasks (0 to 1)")
    return bool(points)
