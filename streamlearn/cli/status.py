"""The status command: the running daemon's progress, regimes and shifts as tables for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import orjson
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamlearn.cli.client import Endpoint, understood
from streamlearn.serve.models import PublicationView, RegimesView, ShiftsView, StatusView
from streamlearn.settings import Settings
from streamlearn.status import FallbackStatus, RegimeStatus, ShiftStatus

_GAP = 2
"""Columns of the terminal between two columns of a table: padding and separator."""
_MIN_TEXT = 20
"""Columns of the terminal that a column of text keeps at least; longer text is folded."""


@dataclass(frozen=True)
class FittedColumn:
    """A heading of one or two lines and the cells below it."""

    heading: str
    cells: Sequence[str]
    importance: int = 0
    """Columns of the lowest importance are left out first; those of the highest importance never."""
    is_text: bool = False
    """Left-justified and folded where it is too long; numbers are right-justified and never folded."""

    @property
    def width(self) -> int:
        """Columns of the terminal that it needs at least."""
        return min(self._widest, _MIN_TEXT) if self.is_text else self._widest

    @property
    def folds(self) -> bool:
        """Whether its cells may take several lines."""
        return self.is_text and self._widest > _MIN_TEXT

    @property
    def _widest(self) -> int:
        return max(map(cell_len, [*self.heading.split("\n"), *self.cells]))

    @property
    def name(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.split())


@dataclass(frozen=True)
class FittedTable:
    """A table that is laid out for the width at which it is printed."""

    columns: Sequence[FittedColumn]
    title: str | None = None
    caption: str = ""
    bold_rows: frozenset[int] = field(default_factory=frozenset)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = self._fitting(options.max_width)
        hidden = [column.name for column in self.columns if column not in shown and column.name]
        captions = [self.caption, f"Hidden at this width: {', '.join(hidden)}." if hidden else ""]
        caption = " ".join(text for text in captions if text)
        table = Table(
            title=self.title,
            caption=caption or None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        depth = max(column.heading.count("\n") for column in shown)
        for column in shown:
            heading = "\n" * (depth - column.heading.count("\n")) + column.heading
            justify = "left" if column.is_text else "right"
            table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=not column.folds)  # type: ignore[arg-type]
        for number, row in enumerate(zip_longest(*(column.cells for column in shown), fillvalue="")):
            table.add_row(*map(Text, row), style="bold" if number in self.bold_rows else "")
        yield table

    def _fitting(self, width: int) -> list[FittedColumn]:
        """The columns that fit, in order."""
        shown = list(self.columns)
        highest = max(column.importance for column in shown)
        while sum(column.width + _GAP for column in shown) - _GAP > width:
            droppable = [column for column in shown if column.importance < highest]
            if not droppable:
                break
            shown.remove(min(reversed(droppable), key=lambda column: column.importance))
        return shown


_REASONS = {
    "too_few_records": "held back: too few hold-out records",
    "worse_than_backbone": "held back: worse than the backbone",
    "worse_than_published": "held back: worse than the published version",
    "answers_changed": "held back: the answers changed",
    "not_loaded": "held back: no replica could load it",
}


def publication_table(publication: PublicationView) -> RenderableType:
    """Regimes with their published versions and what the gate found, then the replicas."""
    parts: list[RenderableType] = []
    regimes = publication.regimes
    if publication.fault is not None:
        parts.append(Text(f"not published: {publication.fault}", style="yellow"))
    if regimes:
        parts.append(
            FittedTable(
                [
                    FittedColumn("regime", [str(each.number) for each in regimes], 9),
                    FittedColumn("published", [each.version or "-" for each in regimes], 9, is_text=True),
                    FittedColumn(
                        "newest", [_REASONS.get(each.held_back or "", "published") for each in regimes], 8, is_text=True
                    ),
                    FittedColumn("hold-out\nloss", [_number(each.loss) for each in regimes], 6),
                    FittedColumn("of the\npublished", [_number(each.published_loss) for each in regimes], 5),
                    FittedColumn("of the\nbackbone", [_number(each.backbone_loss) for each in regimes], 4),
                    FittedColumn("p", [_number(each.p_value) for each in regimes], 3),
                ],
                title=_title(publication),
                caption="Losses are means over hold-out records, nats per token. Low p: the newest is worse.",
            )
        )
    else:
        parts.append(Text("nothing published yet: the first version follows a snapshot with enough hold-out records"))
    for replica in publication.replicas:
        state = f"{replica.loaded} of {replica.wanted} versions loaded" if replica.is_up else "away"
        parts.append(Text(f"{replica.url}  {state}" + (f": {replica.fault}" if replica.fault else "")))
    return Group(*parts)


def _title(publication: PublicationView) -> str:
    if publication.sequence is None:
        return "publication"
    return f"publication {publication.sequence}, snapshot {publication.snapshot}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


SHOWN_SHIFTS = 10
SHOWN_REGIMES = 20

_NO_REGIME = Text("no regime yet: the first one begins with the first records")
PATHS = {
    "status": "/v1/status",
    "regimes": "/v1/regimes",
    "shifts": "/v1/shifts",
    "publication": "/v1/publication",
}


def fetch(settings: Settings) -> dict[str, Any]:
    """The daemon's answers, read shortly after one another.

    Raises:
        SourceError: no daemon answers.
        UsageError: it refuses to, or what answers is no daemon.
    """
    endpoint, advice = Endpoint.of(settings), "start it with `streamlearn run`, or read its log"
    return {name: _answer(endpoint, path, advice) for name, path in PATHS.items()}


def fetch_regimes(settings: Settings) -> Any:
    """The daemon's answer about its regimes.

    Raises:
        SourceError: no daemon answers.
        UsageError: it refuses to, or what answers is no daemon.
    """
    return _answer(Endpoint.of(settings), PATHS["regimes"], "start it with `streamlearn run`")


def _answer(endpoint: Endpoint, path: str, advice: str) -> Any:
    content = endpoint.request(path, advice=advice)
    with understood(endpoint.url + path):
        return orjson.loads(content)


def regimes_table(answer: Any) -> RenderableType:
    """One row per regime.

    Raises:
        UsageError: the answer is that of another release.
    """
    with understood("the daemon"):
        regimes = RegimesView.model_validate(answer).regimes
    return _regimes(regimes, most=len(regimes)) if regimes else _NO_REGIME


def tables(answers: dict[str, Any]) -> RenderableType:
    """Overview, regimes and the newest shifts.

    Raises:
        UsageError: the answers are those of another release.
    """
    with understood("the daemon"):
        status = StatusView.model_validate(answers["status"])
        regimes = RegimesView.model_validate(answers["regimes"]).regimes
        shifts = ShiftsView.model_validate(answers["shifts"])
        publication = PublicationView.model_validate(answers["publication"])
    parts: list[RenderableType] = [_overview(status), ""]
    if status.degraded:
        parts.insert(0, Text(f"degraded: {status.degraded}", style="yellow"))
    parts.append(_regimes(regimes) if regimes else _NO_REGIME)
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
    left = {
        "phase": status.phase + (f": {status.reason}" if status.reason else ""),
        "step": f"{status.step:,}",
        "records": f"{status.records_trained:,} trained{held_out}{dead}",
        "tokens/s": f"{status.tokens_per_s:,.0f}",
        "requests": f"{status.requests.known:,} known, {status.requests.unknown:,} unknown",
        "lag": f"{sum(lags):,} records" if lags else "unknown",
    }
    right = {
        "loss (smoothed)": _status_number(loss.smoothed, "{:.3f} nats/token"),
        "forgetting (AF)": _status_number(forgetting.average_forgetting, "{:.4f}", "no past regime scored yet"),
        "transfer (BWT)": _status_number(forgetting.backward_transfer, "{:+.4f}", "no past regime scored yet"),
        "regime": f"{status.current_regime or '-'}, {status.num_regimes} remembered",
        "unknown answered by": _unknown(status.unknown_requests),
        "snapshot": f"step {snapshot.step:,}, {_age(snapshot.age_s)} ago" if snapshot else "none yet",
    }
    return _Pairs(left, right)


def _unknown(fallback: FallbackStatus) -> str:
    """What answers them, and the losses that decided: its own, and that of the best alternative."""
    losses = {name: loss for name, loss in fallback.losses.items() if loss is not None}
    own = losses.pop(fallback.answered_by, None)
    if own is None or not losses:
        return fallback.answered_by
    return f"{fallback.answered_by} ({own:.3f} vs {min(losses.values()):.3f})"


def _regimes(remembered: tuple[RegimeStatus, ...], most: int = SHOWN_REGIMES) -> FittedTable:
    """The regimes with the newest records, at most `most` of them, by number."""
    newest = sorted(remembered, key=lambda regime: regime.last_record or 0)[-most:]
    regimes = sorted(newest, key=lambda regime: regime.number)
    scored = [regime.now for regime in regimes]
    return FittedTable(
        [
            FittedColumn("regime", [f"{'* ' if regime.current else ''}{regime.number}" for regime in regimes], 9),
            *_labels(regimes),
            FittedColumn("records", [f"{regime.records:,}" for regime in regimes], 9),
            FittedColumn("visits", [f"{regime.visits}" for regime in regimes], 3),
            FittedColumn("held\nout", [f"{regime.holdout_records}" for regime in regimes], 2),
            FittedColumn("hold-out\nloss", [_status_number(now.loss if now else None, "{:.3f}") for now in scored], 8),
            FittedColumn(
                "accuracy\nnow", [_status_number(now.accuracy if now else None, "{:.3f}") for now in scored], 9
            ),
            FittedColumn("accuracy\nbest", [_status_number(regime.best_accuracy, "{:.3f}") for regime in regimes], 6),
            FittedColumn("accuracy\nat end", [_status_number(regime.end_accuracy, "{:.3f}") for regime in regimes], 5),
            FittedColumn("scored\nat step", [f"{now.step:,}" if now else "-" for now in scored], 4),
        ],
        title=f"last {len(regimes)} of {len(remembered)} regimes" if len(remembered) > len(regimes) else "regimes",
        caption="* current regime. Loss (nats per token) and accuracy are of hold-out records.",
        bold_rows=frozenset(number for number, regime in enumerate(regimes) if regime.current),
    )


def _labels(regimes: Sequence[RegimeStatus]) -> list[FittedColumn]:
    """A column of names, and one of those that are frozen, where there are any."""
    names = FittedColumn("name", [regime.name for regime in regimes], 8, is_text=True)
    frozen = FittedColumn("training", ["frozen" if regime.frozen else "" for regime in regimes], 7, is_text=True)
    return [column for column in (names, frozen) if any(column.cells)]


def _origin(shift: ShiftStatus) -> str:
    """Whether the regime is known, new, or was split from another."""
    if shift.known:
        return "known"
    return "new" if shift.parent is None else "split"


def _shifts(shifts: tuple[ShiftStatus, ...], title: str) -> FittedTable:
    is_first = [shift.previous is None for shift in shifts]  # the first regime is no shift and needs no evidence
    probed = [bool(shift.probe_tokens) for shift in shifts]
    evidence = list(zip(shifts, is_first, strict=True))
    probes = list(zip(shifts, probed, strict=True))
    return FittedTable(
        [
            FittedColumn("kind", ["start" if first else shift.kind for shift, first in evidence], 9, is_text=True),
            FittedColumn("declared\nat", [f"{shift.declared_at:,}" for shift in shifts], 8),
            FittedColumn("first\nrecord", [f"{shift.onset:,}" for shift in shifts], 9),
            FittedColumn("regime", [f"{shift.regime} {_origin(shift):5}" for shift in shifts], 9),
            FittedColumn("statistic", ["-" if first else f"{shift.statistic:.3g}" for shift, first in evidence], 6),
            FittedColumn("threshold", ["-" if first else f"{shift.threshold:.3g}" for shift, first in evidence], 5),
            FittedColumn("probe\ntokens", [f"{shift.probe_tokens:,}" if done else "-" for shift, done in probes], 3),
            FittedColumn("probe\nsecs", [f"{shift.probe_seconds:.1f}" if done else "-" for shift, done in probes], 2),
            FittedColumn("mean\nCKA", [_status_number(shift.mean_similarity, "{:.3f}") for shift in shifts], 4),
        ],
        title=title,
    )


def _status_number(value: float | None, form: str, otherwise: str = "-") -> str:
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
