"""Report on streams that nobody cut into tasks: losses by writer and era, regimes, and one plot.

A method's loss at the end, in nats per answer token, is over the scored records of all writers,

    L = sum_n nats_n / sum_n tokens_n                                                                            (1)

and its mean over the seeds. Intervals are from a paired bootstrap: records are drawn again within each writer, the same
for all methods and seeds, 10,000 times (see `bootstrap`). `frozen`, which learns nothing, is the floor.
"""

# Shape suffixes: N scored records, B resamples, the first of which is the sample itself.

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.learn.bootstrap import FROZEN, RESAMPLES, estimate_of
from benchmarks.learn.scores import STOPPED, Run, stream_scores
from streamlearn.errors import UsageError

ERAS = 4
"""Parts of equal size of the scored records, by time."""
SMOOTHED = 100
"""Maximum records of the moving mean in the plot."""
DEFAULT = "streamlearn"
ALL, WENT_ON = "all", "writers that went on"
NOTES = (
    "loss: nats per answer token on the scored records at the end of the stream; [ ]: 95 %, a paired bootstrap over "
    "scored records, which does not cover other training seeds",
    f"less {DEFAULT}: method minus {DEFAULT}, on the same seeds and records; above 0: {DEFAULT} is better",
    "prequential: mean loss of the records of the stream, each before it is trained on",
    f"stopped: loss of writers without a record in the last {1 - STOPPED:.0%} of the stream; forgotten: how far it is "
    "above its lowest value after any eighth of the stream",
    "regimes: detected; NMI: normalised mutual information of regimes and writers, 0 to 1",
    "the other columns: loss by the year of the scored record",
)

Array = NDArray[np.float64]


def is_uncut(run: Run) -> bool:
    """Whether a run's stream was not cut into tasks."""
    return run.get("times") is not None


class NaturalReport:
    """The table, the figures behind it and the plot of one suite."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Read the runs.

        Raises:
            UsageError: a run has no losses.
        """
        self._runs = runs
        self._groups: dict[str, list[Run]] = {}
        for run in runs:
            if not run["record_losses"] and run["method"] != FROZEN:
                raise UsageError(f"{run['method']} on {run['suite']}: expected losses, found none; leave it out")
            self._groups.setdefault(run["method"], []).append(run)
        first = runs[0]
        self._first = first
        self._writers = list(first["last_records"])
        self._times_N = np.array([time for writer in self._writers for time in first["times"]["scored"][writer]])
        self._weights_BN = self._weights()

    def summary(self) -> dict[str, Any]:
        """Return everything that the table shows, by method."""
        eras = self._eras()
        setting = {key: self._first[key] for key in ("suite", "split", "backbone", "profile", "dtype", "device")}
        return {
            "suite": self._first["suite"],
            "setting": {
                **setting,
                "records": len(self._first["times"]["stream"]),
                "records_scored": len(self._times_N),
                "last_records": self._first["last_records"],
                "commits": sorted({str(run["versions"]["commit"])[:12] for run in self._runs}),
            },
            "eras": list(eras),
            "methods": {name: self._row(name, eras) for name in self._groups},
        }

    def _row(self, name: str, eras: Mapping[str, NDArray[np.intp]]) -> dict[str, Any]:
        group = self._groups[name]
        found = [stream_scores(run) for run in group]
        means = {key: _mean([scores[key] for scores in found]) for key in found[0]}
        if group[0]["shuffled"]:  # its records did not come in the order of the stream
            means |= {"prequential_loss": None, "forgotten": None}
        by_record = [_by_record(run, self._writers) for run in group]
        ends = np.cumsum([0, *(len(self._first["times"]["scored"][writer]) for writer in self._writers)])
        return {
            "seeds": [run["seed"] for run in group],
            "lr": group[0]["config"]["learner"]["lr"] if name != FROZEN else None,
            "loss": self._estimate([self._resampled_losses(run, np.arange(len(self._times_N))) for run in group]),
            "less_default": {part: self._difference(name, own) for part, own in self._parts(eras).items()},
            "prequential": means["prequential_loss"],
            "stopped": means["stopped"],
            "forgotten": means["forgotten"],
            "regimes": means["regimes"],
            "nmi": means["nmi"],
            "eras": {
                era: fmean(_loss(nats[own], tokens[own]) for nats, tokens in by_record) for era, own in eras.items()
            },
            "writers": {
                writer: fmean(_loss(nats[low:high], tokens[low:high]) for nats, tokens in by_record)
                for writer, (low, high) in zip(self._writers, pairwise(ends), strict=True)
            },
        }

    def _parts(self, eras: Mapping[str, NDArray[np.intp]]) -> dict[str, NDArray[np.intp]]:
        """Name -> scored records: all, those of the writers that did not stop, of each era, of each writer."""
        last, stopped_at = self._first["last_records"], STOPPED * len(self._first["times"]["stream"])
        writers_N = np.array([writer for writer in self._writers for _ in self._first["times"]["scored"][writer]])
        by_writer = {writer: np.flatnonzero(writers_N == writer) for writer in sorted(last, key=last.__getitem__)}
        went_on = [own for writer, own in by_writer.items() if last[writer] > stopped_at]
        return {ALL: np.arange(len(writers_N)), WENT_ON: np.sort(np.concatenate(went_on)), **eras, **by_writer}

    def _difference(self, name: str, part: NDArray[np.intp]) -> dict[str, Any] | None:
        base = {run["seed"]: run for run in self._groups.get(DEFAULT, ())}
        own = {run["seed"]: run for run in self._groups[name]}
        if name == FROZEN:
            own = dict.fromkeys(base, next(iter(own.values())))
        pairs = [(run, base[seed]) for seed, run in own.items() if seed in base]
        if name == DEFAULT or not pairs:
            return None
        return self._estimate(
            [self._resampled_losses(run, part) - self._resampled_losses(other, part) for run, other in pairs]
        )

    def _resampled_losses(self, run: Run, part: NDArray[np.intp]) -> Array:
        """Eq. (1) of every resample, over some of the records."""
        nats_N, tokens_N = _by_record(run, self._writers)
        weights_BN = self._weights_BN[:, part]
        losses_B: Array = (weights_BN @ nats_N[part]) / (weights_BN @ tokens_N[part])
        return losses_B

    def _estimate(self, by_seed: Sequence[Array]) -> dict[str, Any]:
        return estimate_of(np.mean(by_seed, axis=0), len(by_seed))._asdict()

    def _weights(self) -> Array:
        random = np.random.default_rng(0)
        numbers = [len(self._first["times"]["scored"][writer]) for writer in self._writers]
        drawn = [random.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) for n in numbers]
        return np.vstack([np.ones((1, sum(numbers))), np.hstack(drawn)])

    def _eras(self) -> dict[str, NDArray[np.intp]]:
        """Years -> the scored records of the era."""
        order = np.argsort(self._times_N, kind="stable")
        parts = np.array_split(order, ERAS)
        return {f"{_year(self._times_N[part[0]])} to {_year(self._times_N[part[-1]])}": part for part in parts}

    def draw(self, summary: Mapping[str, Any], file: Path) -> None:
        """Draw the prequential loss along the stream, and the loss at the end by era, of what learns."""
        import matplotlib  # noqa: PLC0415 - an extra

        matplotlib.use("Agg")  # draws to files and opens no window
        from matplotlib import pyplot as plt  # noqa: PLC0415

        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(3, 2))
        width = min(SMOOTHED, len(self._first["times"]["stream"]))
        shown = [name for name in self._groups if name != FROZEN]
        colors = {name: f"C{number}" for number, name in enumerate(shown)}
        for name in shown:
            if not self._groups[name][0]["shuffled"]:
                losses = np.mean([run["record_losses"] for run in self._groups[name]], axis=0)
                mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
                left.plot(np.arange(width, len(losses) + 1), mean, color=colors[name], label=name, linewidth=1.2)
        for place, year in self._years():
            left.axvline(place, color="0.9", linewidth=0.8, zorder=0)
            left.annotate(f"{year}", (place, 0.01), xycoords=("data", "axes fraction"), fontsize=7, color="0.4")
        left.set_xlabel("record of the stream")
        left.set_ylabel("loss of a record before it is trained on,\nnats per token")
        left.set_title(f"While it learns (mean of the last {width} records)", fontsize=10, loc="left")
        for name in shown:
            by_era = [*summary["methods"][name]["eras"].values()]
            right.plot(summary["eras"], by_era, "o-", color=colors[name], label=name, linewidth=1.2)
        right.set_ylabel("loss on scored records, nats per token")
        right.set_title("At the end of the stream, by the scored records' years", fontsize=10, loc="left")
        right.tick_params(axis="x", labelsize=8)
        right.legend(fontsize=8, frameon=False)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=100)
        plt.close(figure)

    def _years(self) -> list[tuple[int, int]]:
        """Where the stream enters every third year; none if its records are not in the order of their time."""
        times = self._first["times"]["stream"]
        if times != sorted(times):
            return []
        years = list(map(_year, times))
        starts = [(place, year) for place, (before, year) in enumerate(pairwise(years), 1) if year != before]
        return [(place, year) for place, year in starts if year % 3 == 0]


def markdown(summary: Mapping[str, Any]) -> str:
    """Format the tables of a suite."""
    setting, methods = summary["setting"], summary["methods"]
    eras, records = summary["eras"], setting["records"]
    columns = [
        "method",
        "rate",
        "loss, 95 %",
        f"less {DEFAULT}, 95 %",
        "prequential",
        "stopped",
        "forgotten",
        "regimes",
        "NMI",
    ]
    rows = [
        [
            f"**{name}**" if name == DEFAULT else name,
            _number(row["lr"], "g"),
            _interval(row["loss"], ".3f"),
            _interval(row["less_default"][ALL], "+.3f"),
            *(_number(row[key], ".3f") for key in ("prequential", "stopped", "forgotten")),
            _number(row["regimes"], "g"),
            _number(row["nmi"], ".2f"),
            *(_number(row["eras"][era], ".3f") for era in eras),
            f"{len(row['seeds'])}",
        ]
        for name, row in methods.items()
    ]
    last = setting["last_records"]
    writers = sorted(last, key=last.__getitem__)
    by_writer = [[name, *(f"{row['writers'][writer]:.3f}" for writer in writers)] for name, row in methods.items()]
    others = {name: row["less_default"] for name, row in methods.items() if row["less_default"][ALL] is not None}
    differences = [
        [part.rpartition("/")[2], *(_interval(own[part], "+.3f") for own in others.values())]
        for part in (ALL, WENT_ON, *eras, *writers)
    ]
    lines = [
        f"# {summary['suite']}",
        "",
        f"{setting['backbone']['model']} with profile {setting['profile']}: {records} records in the order of their "
        f"time; scored on {setting['records_scored']} {setting['split']} records. {setting['dtype']} on "
        f"{setting['device']}, commit {', '.join(setting['commits'])}.",
        "",
        *_table([*columns, *eras, "n"], rows),
        "",
        *(f"- {note}" for note in NOTES),
        "",
        "## By writer",
        "",
        "In brackets where in the stream a writer's last record is.",
        "",
        *_table(
            ["method", *(f"{writer.rpartition('/')[2]} ({last[writer] / records:.0%})" for writer in writers)],
            by_writer,
        ),
        "",
        f"## Less {DEFAULT}, by part of the scored records",
        "",
        f"Method minus {DEFAULT}, 95 %; above 0: {DEFAULT} is better.",
        "",
        *_table(["scored records", *others], differences),
    ]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (headings, ["---"] * len(headings), *rows)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _interval(estimate: Mapping[str, Any] | None, form: str) -> str:
    if estimate is None:
        return "-"
    return f"{estimate['value']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def _by_record(run: Run, writers: Sequence[str]) -> tuple[Array, Array]:
    """Nats and tokens of the scored records at the end."""
    pairs = np.array([pair for writer in writers for pair in run["teacher"][-1][writer]["records"]], dtype=float)
    return pairs[:, 0], pairs[:, 1]


def _loss(nats: Array, tokens: Array) -> float:
    return float(nats.sum() / tokens.sum())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _year(time: float) -> int:
    return datetime.fromtimestamp(float(time), UTC).year
