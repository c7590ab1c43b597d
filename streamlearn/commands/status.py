"""The status command: what the running daemon says about itself, as tables for a terminal."""

from typing import Any

import orjson
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamlearn.commands.client import ask
from streamlearn.serve.views import RegimesView, ShiftsView, StatusView
from streamlearn.settings import Settings
from streamlearn.status.status import RegimeStatus, ShiftStatus

SHOWN_SHIFTS = 10

PATHS = {"status": "/v1/status", "regimes": "/v1/regimes", "shifts": "/v1/shifts"}


def ask_all(settings: Settings) -> dict[str, Any]:
    """The three answers, one shortly after the other.

    Raises:
        SourceError: no daemon answers.
    """
    otherwise = "start it with `streamlearn run`, or look at its log"
    return {name: orjson.loads(ask(settings, path, otherwise=otherwise)) for name, path in PATHS.items()}


def tables(answers: dict[str, Any]) -> RenderableType:
    """Headline figures, regimes, the last shifts."""
    status = StatusView.model_validate(answers["status"])
    regimes = RegimesView.model_validate(answers["regimes"]).regimes
    shifts = ShiftsView.model_validate(answers["shifts"])
    parts: list[RenderableType] = [_headline(status), ""]
    parts.append(_regimes(regimes) if regimes else Text("no regime yet: the first begins with the first records"))
    if shifts.shifts:
        newest = shifts.shifts[-SHOWN_SHIFTS:]
        total = sum(shifts.total.values())
        parts += ["", _shifts(newest, f"last {len(newest)} of {total} shifts" if total > len(newest) else "shifts")]
    return Group(*parts)


def _headline(status: StatusView) -> Table:
    """Two columns of figures."""
    lags = [row.lag for row in status.partitions if row.lag is not None]
    loss, forgetting, snapshot = status.prequential_loss_nats, status.forgetting, status.last_snapshot
    held_out = f", {status.records_held_out:,} held out" if status.records_held_out else ""
    dead = f", {status.records_dead_lettered:,} dead letters" if status.records_dead_lettered else ""
    left = {
        "phase": status.phase + (f": {status.reason}" if status.reason else ""),
        **({"degraded": status.degraded} if status.degraded else {}),
        "step": f"{status.step:,}",
        "records": f"{status.records_trained:,} trained{held_out}{dead}",
        "tokens/s": f"{status.tokens_per_s:,.0f}",
        "lag": f"{sum(lags):,} records" if lags else "unknown",
    }
    right = {
        "loss, smoothed": _number(loss.smoothed, "{:.3f} nats/token"),
        "forgetting (AF)": _number(forgetting.average_forgetting, "{:.4f}", "no past regime scored yet"),
        "transfer (BWT)": _number(forgetting.backward_transfer, "{:+.4f}", "no past regime scored yet"),
        "regime": f"{status.current_regime or '-'} of {status.num_regimes} remembered",
        "snapshot": f"step {snapshot.step:,}, {_age(snapshot.age_s)} ago" if snapshot else "none yet",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for (name, value), (other, figure) in zip(left.items(), right.items(), strict=True):
        table.add_row(Text(name, style="dim"), Text(value), Text(other, style="dim"), Text(figure))
    return table


def _regimes(regimes: tuple[RegimeStatus, ...]) -> Table:
    table = _table("regimes")
    table.add_column("")
    for name in ("regime", "records", "visits", "hold-out", "loss", "accuracy", "best", "at end", "scored at"):
        table.add_column(name, justify="right")
    for regime in regimes:
        now = regime.now
        table.add_row(
            "*" if regime.current else "",
            f"{regime.number}",
            f"{regime.records:,}",
            f"{regime.visits}",
            f"{regime.holdout_records}",
            _number(None if now is None else now.loss, "{:.3f}"),
            _number(None if now is None else now.accuracy, "{:.3f}"),
            _number(regime.best_accuracy, "{:.3f}"),
            _number(regime.end_accuracy, "{:.3f}"),
            f"step {now.step:,}" if now else "-",
            style="bold" if regime.current else "",
        )
    table.caption = "* the stream is in it; loss and accuracies are of its hold-out records"
    return table


def _shifts(shifts: tuple[ShiftStatus, ...], title: str) -> Table:
    table = _table(title)
    table.add_column("kind")
    for name in ("record", "onset", "regime"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name in ("statistic", "threshold", "probed tokens", "seconds", "mean CKA"):
        table.add_column(name, justify="right")
    for shift in shifts:
        probed, first = bool(shift.probe_tokens), shift.previous is None  # the first of all needs no evidence
        table.add_row(
            shift.kind,
            f"{shift.declared_at:,}",
            f"{shift.onset:,}",
            f"{shift.regime}",
            "known" if shift.known else "new",
            "-" if first else f"{shift.statistic:.3g}",
            "-" if first else f"{shift.threshold:.3g}",
            f"{shift.probe_tokens:,}" if probed else "-",
            f"{shift.probe_seconds:.1f}" if probed else "-",
            _number(shift.mean_similarity, "{:.3f}"),
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _number(value: float | None, form: str, otherwise: str = "-") -> str:
    return otherwise if value is None else form.format(value)


def _age(seconds: float) -> str:
    """Rounded down to one unit.

    >>> _age(59.9), _age(3599), _age(86400)
    ('59 s', '59 min', '24 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 1:.0f} s"
