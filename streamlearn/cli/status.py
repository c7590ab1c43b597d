"""The status command: the running daemon's progress, regimes and shifts as tables for a terminal."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamlearn.cli.client import checked_response, daemon_url, request
from streamlearn.cli.options import Cell, ignored_counts, render_table
from streamlearn.errors import SourceError
from streamlearn.serve.models import PublicationView, RegimesView, ShiftsView, StatusView
from streamlearn.settings import Settings
from streamlearn.status import FallbackStatus, RegimePublication, RegimeStatus, ShiftStatus, SliceScore

SHOWN_SHIFTS = 10
SHOWN_REGIMES = 20
WATCH_EVERY_S = 1.0  # between two frames of --watch

_NO_REGIME = Text("no regime yet: the first one begins with the first records")
ENDPOINTS = ("status", "regimes", "shifts", "publication")


def fetch(settings: Settings, *names: str) -> dict[str, Any]:
    """The daemon's responses by endpoint, read shortly after one another; all of `ENDPOINTS` without `names`.

    Raises:
        SourceError: no daemon answers.
        UsageError: it refuses, or whatever answers is no daemon.
    """
    responses: dict[str, Any] = {}
    for name in names or ENDPOINTS:
        path = f"/v1/{name}"
        content = request(settings, path, advice="start it with `streamlearn run`, or read its log")
        with checked_response(daemon_url(settings) + path):
            responses[name] = orjson.loads(content)
    return responses


def watch(settings: Settings, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the tables again every `WATCH_EVERY_S` seconds, until Ctrl-C; once where the output is no terminal.

    Raises:
        SourceError: no daemon answers, and none did before.
        UsageError: it refuses, or whatever answers is no daemon.
    """
    shown: RenderableType = tables(fetch(settings))
    if not console.is_terminal:
        console.print(shown)
        return
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(WATCH_EVERY_S)
                try:
                    shown = tables(fetch(settings))
                    live.update(shown, refresh=True)
                except SourceError as error:
                    live.update(Group(Text(f"unreachable: {error}", style="yellow"), shown), refresh=True)
    except KeyboardInterrupt:
        return


def regimes_table(response: Any) -> RenderableType:
    """One row per regime.

    Raises:
        UsageError: the response is that of another release.
    """
    with checked_response("the daemon"):
        regimes = TypeAdapter(RegimesView).validate_python(response).regimes
    return _regimes(regimes, most=len(regimes)) if regimes else _NO_REGIME


def tables(responses: dict[str, Any]) -> RenderableType:
    """Overview, regimes and the newest shifts.

    Raises:
        UsageError: the responses are those of another release.
    """
    with checked_response("the daemon"):
        status = TypeAdapter(StatusView).validate_python(responses["status"])
        regimes = TypeAdapter(RegimesView).validate_python(responses["regimes"]).regimes
        shifts = ShiftsView.model_validate(responses["shifts"])
        publication = TypeAdapter(PublicationView).validate_python(responses["publication"])
    parts: list[RenderableType] = [_overview(status), ""]
    if status.degraded:
        parts.insert(0, Text(f"degraded: {status.degraded}", style="yellow"))
    parts.append(_regimes(regimes) if regimes else _NO_REGIME)
    if any(regime.canaries for regime in regimes):
        parts += ["", _canaries(regimes)]
    if shifts.shifts:
        newest = shifts.shifts[-SHOWN_SHIFTS:]
        total = sum(shifts.total.values())
        parts += ["", _shifts(newest, f"last {len(newest)} of {total} shifts" if total > len(newest) else "shifts")]
    if publication.enabled:
        parts += ["", publication_table(publication)]
    return Group(*parts)


@dataclass(frozen=True)
class _Pairs:
    """Names and values, in two columns of pairs if they fit, else in one."""

    left: dict[str, str]
    right: dict[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = (self.left, self.left.values(), self.right, self.right.values())
        fits = sum(max(map(cell_len, column)) + 2 for column in columns) <= options.max_width
        sides = [self.left, self.right] if fits else [self.left | self.right]
        table = Table.grid(padding=(0, 2, 0, 0))
        for pairs in zip(*(side.items() for side in sides), strict=True):
            table.add_row(*(cell for name, value in pairs for cell in (Text(name, style="dim"), Text(value))))
        yield table


def _overview(status: StatusView) -> _Pairs:
    lags = [row.lag for row in status.partitions if row.lag is not None]
    loss, forgetting, snapshot = status.prequential_loss_nats, status.forgetting, status.last_snapshot
    held_out = f", {status.records_held_out:,} held out" if status.records_held_out else ""
    dead = f", {status.records_dead_lettered:,} dead letters" if status.records_dead_lettered else ""
    ignored = "".join(f", {counted}" for counted in ignored_counts(status.ignored))
    truncated = sum(status.truncated_records.values())
    cut = f", {truncated:,} truncated by {sum(status.truncated_tokens.values()):,} tokens" if truncated else ""
    left = {
        "phase": status.phase + (f": {status.reason}" if status.reason else ""),
        "step": f"{status.step:,}",
        "records": f"{status.records_trained:,} trained{held_out}{dead}{ignored}{cut}",
        "tokens/s": f"{status.tokens_per_s:,.0f}",
        "requests": f"{status.requests.known:,} known, {status.requests.unknown:,} unknown",
        "lag": f"{sum(lags):,} records" if lags else "unknown",
    }
    right = {
        "loss (smoothed)": _number(loss.smoothed, "{:.3f} nats/token"),
        "forgetting (AF)": _number(forgetting.average_forgetting, "{:.4f}", "no past regime scored yet"),
        "transfer (BWT)": _number(forgetting.backward_transfer, "{:+.4f}", "no past regime scored yet"),
        "regime": f"{status.current_regime or '-'}, {status.num_regimes} remembered",
        "unknown answered by": _unknown(status.unknown_requests),
        "snapshot": f"step {snapshot.step:,}, {_age(snapshot.age_s)} ago" if snapshot else "none yet",
    }
    return _Pairs(left, right)


def _unknown(fallback: FallbackStatus) -> str:
    """What answers unknown requests, with its loss and that of the best alternative."""
    losses = {name: loss for name, loss in fallback.losses.items() if loss is not None}
    own = losses.pop(fallback.answered_by, None)
    if own is None or not losses:
        return fallback.answered_by
    return f"{fallback.answered_by} ({own:.3f} vs {min(losses.values()):.3f})"


def _regimes(remembered: tuple[RegimeStatus, ...], most: int = SHOWN_REGIMES) -> Table:
    """The regimes with the newest records, at most `most` of them, by number."""
    newest = sorted(remembered, key=lambda regime: regime.last_record or 0)[-most:]
    regimes = sorted(newest, key=lambda regime: regime.number)
    columns: dict[str, Cell[RegimeStatus]] = {
        "regime": lambda regime: f"{'* ' if regime.current else ''}{regime.number}",
        "name": lambda regime: regime.name,
        "training": lambda regime: "frozen" if regime.frozen else "",
        "records": lambda regime: f"{regime.records:,}",
        "visits": lambda regime: f"{regime.visits}",
        "held\nout": lambda regime: f"{regime.holdout_records}",
        "kept to\nrehearse": lambda regime: f"{regime.rehearsal_records or ''}",
        "hold-out\nloss": lambda regime: _number(regime.now.loss if regime.now else None),
        "accuracy\nnow": lambda regime: _number(regime.now.accuracy if regime.now else None),
        "accuracy\nbest": lambda regime: _number(regime.best_accuracy),
        "accuracy\nat end": lambda regime: _number(regime.end_accuracy),
        "scored\nat step": lambda regime: f"{regime.now.step:,}" if regime.now else "-",
    }
    return render_table(
        regimes,
        {heading: cell for heading, cell in columns.items() if any(map(cell, regimes))},
        text=("name", "training"),
        title=f"last {len(regimes)} of {len(remembered)} regimes" if len(remembered) > len(regimes) else "regimes",
        caption="* current regime. Loss (nats per token) and accuracy are of hold-out records.",
        bold=lambda regime: regime.current,
    )


def _canaries(regimes: tuple[RegimeStatus, ...]) -> Table:
    """Each regime on each slice, the largest harm first."""
    rows = [(regime, row) for regime in regimes for row in regime.canaries]
    rows.sort(key=lambda pair: pair[1].backbone_loss - pair[1].loss)
    columns: dict[str, Cell[tuple[RegimeStatus, SliceScore]]] = {
        "regime": lambda pair: str(pair[0].number),
        "slice": lambda pair: pair[1].slice,
        "records": lambda pair: f"{pair[1].records}",
        "loss": lambda pair: _number(pair[1].loss),
        "of the\nbackbone": lambda pair: _number(pair[1].backbone_loss),
        "harm": lambda pair: _number(pair[1].loss - pair[1].backbone_loss, "{:+.3f}"),
        "scored\nat step": lambda pair: f"{pair[0].canaries_step:,}",
        "worst records": lambda pair: " ".join(pair[1].worst[:2]),
    }
    return render_table(
        rows[:SHOWN_REGIMES],
        columns,
        text=("slice", "worst records"),
        title=f"worst {SHOWN_REGIMES} of {len(rows)} canary scores" if len(rows) > SHOWN_REGIMES else "canaries",
        caption="Losses are means over records from outside the stream, nats per token.",
    )


def _shifts(shifts: tuple[ShiftStatus, ...], title: str) -> Table:
    """The first regime is no shift: it has no evidence."""
    columns: dict[str, Cell[ShiftStatus]] = {
        "kind": lambda shift: "start" if shift.previous is None else shift.kind,
        "declared\nat": lambda shift: f"{shift.declared_at:,}",
        "first\nrecord": lambda shift: f"{shift.onset:,}",
        "regime": lambda shift: f"{shift.regime} {_origin(shift):5}",
        "statistic": lambda shift: "-" if shift.previous is None else f"{shift.statistic:.3g}",
        "threshold": lambda shift: "-" if shift.previous is None else f"{shift.threshold:.3g}",
        "probe\ntokens": lambda shift: f"{shift.probe_tokens:,}" if shift.probe_tokens else "-",
        "probe\nsecs": lambda shift: f"{shift.probe_seconds:.1f}" if shift.probe_tokens else "-",
        "mean\nCKA": lambda shift: _number(shift.mean_similarity),
    }
    return render_table(shifts, columns, text=("kind",), title=title)


def _origin(shift: ShiftStatus) -> str:
    """Whether the regime is known, new, or was split from another."""
    if shift.known:
        return "known"
    return "new" if shift.parent is None else "split"


_REASONS = {
    "too_few_records": "held back: too few hold-out records",
    "worse_than_backbone": "held back: worse than the backbone",
    "worse_than_published": "held back: worse than the published version",
    "worse_on_canary": "held back: worse on canaries",
    "answers_changed": "held back: the answers changed",
    "not_loaded": "held back: not delivered to replicas or store",
}


def _newest(regime: RegimePublication) -> str:
    """The newest version's fate; harm is on the slice with the smallest p-value."""
    said = _REASONS.get(regime.held_back or "", "published")
    if regime.held_back != "worse_on_canary":
        return said
    row = min(regime.canaries, key=lambda row: 1.0 if row.p_value is None else row.p_value)
    return f"{said}, slice {row.slice} ({', '.join(row.worst)})"


def publication_table(publication: PublicationView) -> RenderableType:
    """Regimes with their published versions and the result of the gate, then the replicas."""
    parts: list[RenderableType] = []
    if publication.fault is not None:
        parts.append(Text(f"not published: {publication.fault}", style="yellow"))
    if publication.regimes:
        columns: dict[str, Cell[RegimePublication]] = {
            "regime": lambda regime: str(regime.number),
            "published": lambda regime: regime.version or "-",
            "newest": _newest,
            "hold-out\nloss": lambda regime: _number(regime.loss),
            "of the\npublished": lambda regime: _number(regime.published_loss),
            "of the\nbackbone": lambda regime: _number(regime.backbone_loss),
            "p": lambda regime: _number(regime.p_value),
        }
        newest = f"publication {publication.sequence}, snapshot {publication.snapshot}"
        parts.append(
            render_table(
                publication.regimes,
                columns,
                text=("published", "newest"),
                title="publication" if publication.sequence is None else newest,
                caption="Losses are means over hold-out records, nats per token. Low p: the newest is worse.",
            )
        )
    else:
        parts.append(Text("nothing published yet: the first version follows a snapshot with enough hold-out records"))
    for replica in publication.replicas:
        state = f"{replica.loaded} of {replica.wanted} versions loaded" if replica.is_up else "unreachable"
        parts.append(Text(f"{replica.url}  {state}" + (f": {replica.fault}" if replica.fault else "")))
    return Group(*parts)


def _number(value: float | None, form: str = "{:.3f}", otherwise: str = "-") -> str:
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
