"""One frame of `watch`, laid out for the terminal: on a narrow one the tables stand below one another."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamlearn.commands.fitted_table import FittedColumn, FittedTable
from streamlearn.commands.loss_chart import BACKBONE_MARK, BACKBONE_STYLE, LOSS_STYLE, ChartPoint, LossChart
from streamlearn.commands.segment_bar import SegmentBar, symbol
from streamlearn.commands.watched import WatchedDaemon
from streamlearn.serve.history_view import DeadLetterView, PointColumns
from streamlearn.serve.views import StatusView
from streamlearn.status.status import RegimeStatus, ShiftStatus

WIDE = 140  # columns of the terminal from which tables stand side by side
_HEADER_LINES = 4
_BAR_LINES = 2
_MAX_CHART_LINES = 20
_TABLE_LINES = 3  # title, heading, rule
_MAX_LETTERS = 2  # dead letters shown
_SAMPLED = 20  # newest points with a sample, of which the header shows the mean
_DEFAULT_HEIGHT = 40  # where the output is no terminal


class WatchFrame:
    """The daemon as it is known now."""

    def __init__(self, watched: WatchedDaemon) -> None:
        self._watched = watched

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        height = console.height if console.is_terminal else _DEFAULT_HEIGHT
        yield from _header(self._watched)
        if self._watched.status is not None:
            yield from self._body(options.max_width, height - _HEADER_LINES)

    def _body(self, width: int, height: int) -> Iterator[RenderableType]:
        """What stands below the header: the tables get what they need, up to two thirds, and the chart the rest."""
        tables = self._side_by_side if width >= WIDE else self._one_below_another
        dead_letter_lines = min(_MAX_LETTERS, len(self._watched.history.dead_letters)) + 1
        lines = [len(self._regimes) + _TABLE_LINES, len(self._shifts) + _TABLE_LINES + dead_letter_lines]
        wanted = max(lines) if width >= WIDE else sum(lines)
        chart = min(_MAX_CHART_LINES, max(height // 3 - _BAR_LINES, height - _BAR_LINES - wanted))
        yield from _along_the_stream(self._watched, chart)
        yield from tables(height - _BAR_LINES - chart, dead_letter_lines)

    def _one_below_another(self, height: int, dead_letter_lines: int) -> Iterator[RenderableType]:
        rows = max(2, height - 2 * _TABLE_LINES - dead_letter_lines)
        num_shifts = min(max(1, rows // 3), max(1, len(self._shifts)))
        yield _regimes(self._regimes, rows - num_shifts)
        yield _shifts(self._shifts, num_shifts)
        yield _dead_letters(self._watched, dead_letter_lines - 1)

    def _side_by_side(self, height: int, dead_letter_lines: int) -> Iterator[RenderableType]:
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        shifts = _shifts(self._shifts, max(1, height - _TABLE_LINES - dead_letter_lines))
        right = Group(shifts, _dead_letters(self._watched, dead_letter_lines - 1))
        grid.add_row(_regimes(self._regimes, max(1, height - _TABLE_LINES)), right)
        yield grid

    @property
    def _regimes(self) -> Sequence[RegimeStatus]:
        return self._watched.regimes.regimes if self._watched.regimes else ()

    @property
    def _shifts(self) -> Sequence[ShiftStatus]:
        return self._watched.shifts.shifts if self._watched.shifts else ()


def _header(watched: WatchedDaemon) -> Iterator[Text]:
    status = watched.status
    if watched.fault:
        text = f"no daemon answers at {watched.endpoint.url} for {watched.away_s:.0f} s: asking again"
        yield _line(Text(text, style="bold red"))
    elif status is not None:
        yield _line(_title(status, watched.endpoint.url))
    if status is None:
        return
    yield _line(Text(_progress(status)))
    yield _line(Text(_learning(watched, status)))
    if not watched.fault and status.degraded:
        yield _line(Text(f"degraded: {status.degraded}", style="bold yellow"))
    else:
        yield _line(_legend())


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "crop"  # an ellipsis is not ASCII
    return text


def _title(status: StatusView, url: str) -> Text:
    text = Text(f"streamlearn {status.phase}", style="bold")
    if status.reason:
        text.append(f": {status.reason}")
    text.append(f"  regime {status.current_regime or '-'} of {status.num_regimes}", style="not bold")
    text.append(f"  {sum(status.num_shifts.values())} shifts", style="not bold")
    requests = status.requests
    if requests.known + requests.unknown:
        text.append(
            f"  {requests.known + requests.unknown:,} requests, {requests.unknown:,} unexplained", style="not bold"
        )
    text.append(f"  {url}", style="not bold dim")
    return text


def _progress(status: StatusView) -> str:
    lags = [row.lag for row in status.partitions if row.lag is not None]
    snapshot = status.last_snapshot
    parts = [
        f"{status.records_trained:,} records",
        f"{status.records_held_out:,} held out",
        f"{status.tokens_per_s:,.0f} tokens/s",
        f"lag {sum(lags):,}" if lags else "lag unknown",
        f"snapshot {snapshot.name} {_age(snapshot.age_s)} ago" if snapshot else "no snapshot",
    ]
    return "  ".join(parts)


def _learning(watched: WatchedDaemon, status: StatusView) -> str:
    forgetting = status.forgetting
    model, backbone = _newest_sample(watched.history.points)
    parts = [
        f"loss {_number(status.prequential_loss_nats.smoothed, '.3f')}",
        f"sampled: model {_number(model, '.3f')}, backbone {_number(backbone, '.3f')}",
        f"AF {_number(forgetting.average_forgetting, '.4f')}",
        f"BWT {_number(forgetting.backward_transfer, '+.4f')}",
    ]
    return "  ".join(parts)


def _newest_sample(points: PointColumns) -> tuple[float | None, float | None]:
    """Mean loss of the newest points that were sampled, under the model and under the backbone."""
    rows = zip(points.sample_tokens, points.sample_loss, points.backbone_loss, strict=True)
    newest = [(tokens, own, other) for tokens, own, other in rows if own is not None and other is not None][-_SAMPLED:]
    total = sum(tokens for tokens, _, _ in newest)
    if not total:
        return None, None
    return sum(n * own for n, own, _ in newest) / total, sum(n * other for n, _, other in newest) / total


def _legend() -> Text:
    text = Text("prequential loss, nats/token: ", style="dim")
    text.append("line the model", style=LOSS_STYLE)
    text.append(", ", style="dim")
    text.append(f"{BACKBONE_MARK} a sample under the backbone", style=BACKBONE_STYLE)
    return text


def _along_the_stream(watched: WatchedDaemon, height: int) -> Iterator[RenderableType]:
    points, segments = watched.history.points, watched.history.segments
    if not points.record:
        yield Text("no record yet: the series begin with the first batch")
        return
    first, last = points.record[0] - points.records[0] + 1, max(points.record[-1], points.record[0])
    spans = [(end - number + 1, end) for end, number in zip(points.record, points.records, strict=True)]
    loss = _chart_points(spans, points.loss, points.learned_tokens)
    backbone = _chart_points([(end, end) for _, end in spans], points.backbone_loss, points.sample_tokens)
    yield LossChart(loss, backbone, first, last, height)
    yield SegmentBar(segments, first, last)


def _chart_points(
    spans: Sequence[tuple[int, int]], values: Sequence[float | None], weights: Sequence[float]
) -> list[ChartPoint]:
    rows = zip(spans, values, weights, strict=True)
    return [ChartPoint(*span, value, weight) for span, value, weight in rows if value is not None]


def _regimes(regimes: Sequence[RegimeStatus], most: int) -> FittedTable:
    """The regimes that were in the stream last, the current one first."""
    newest = sorted(regimes, key=lambda regime: (regime.current, regime.last_record or 0), reverse=True)[:most]
    scored = [regime.now for regime in newest]
    title = f"the newest {len(newest)} of {len(regimes)} regimes" if len(newest) < len(regimes) else "regimes"
    return FittedTable(
        [
            FittedColumn(
                "", [("*" if each.current else " ") + symbol(each.number) for each in newest], 9, is_text=True
            ),
            FittedColumn("regime", [each.name or f"{each.number}" for each in newest], 9, is_text=True),
            FittedColumn("records", [f"{each.records:,}" for each in newest], 9),
            FittedColumn("visits", [f"{each.visits}" for each in newest], 3),
            FittedColumn("loss", [_number(now.loss if now else None, ".3f") for now in scored], 8),
            FittedColumn("accuracy", [_number(now.accuracy if now else None, ".3f") for now in scored], 9),
            FittedColumn("forgotten", [_number(_forgotten(each), ".3f") for each in newest], 7),
        ],
        title=f"{title}: loss and accuracy of hold-out records",
        bold_rows=frozenset(row for row, each in enumerate(newest) if each.current),
    )


def _forgotten(regime: RegimeStatus) -> float | None:
    """Its part of the average forgetting."""
    if regime.best_accuracy is None or regime.now is None:
        return None
    return regime.best_accuracy - regime.now.accuracy


def _shifts(shifts: Sequence[ShiftStatus], most: int) -> FittedTable:
    """The newest shifts, the newest first."""
    newest = shifts[: -most - 1 : -1]
    return FittedTable(
        [
            FittedColumn("from record", [f"{each.onset:,}" for each in newest], 9),
            FittedColumn("kind", [_kind(each) for each in newest], 8, is_text=True),
            FittedColumn("regime", [f"{each.regime} {_origin(each)}" for each in newest], 9, is_text=True),
            FittedColumn("statistic", [_evidence(each, each.statistic) for each in newest], 6),
            FittedColumn("threshold", [_evidence(each, each.threshold) for each in newest], 5),
            FittedColumn("delay", [f"{each.declared_at - each.onset}" for each in newest], 7),
            FittedColumn("done about it", [_done(each) for each in newest], 4, is_text=True),
        ],
        title="newest shifts",
    )


def _kind(shift: ShiftStatus) -> str:
    return "start" if shift.previous is None else shift.kind


def _origin(shift: ShiftStatus) -> str:
    if shift.known:
        return "known"
    return "new" if shift.parent is None else f"split from {shift.parent}"


def _evidence(shift: ShiftStatus, value: float) -> str:
    return "-" if shift.previous is None else f"{value:.3g}"


def _done(shift: ShiftStatus) -> str:
    """What the daemon did about a shift."""
    if shift.kind == "answers":
        return "old answers released"
    if shift.started_from is not None:
        return f"copied regime {shift.started_from}"
    if shift.probe_tokens:
        return f"probed, {shift.probe_tokens:,} tokens"
    return "experts used again" if shift.known else "new experts"


def _dead_letters(watched: WatchedDaemon, most: int) -> RenderableType:
    """Counts by reason, and the newest with what is wrong."""
    status, newest = watched.status, watched.history.dead_letters[: -most - 1 : -1]
    counts = status.dead_letters if status is not None else {}
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items(), key=lambda row: -row[1]))
    title = _line(Text(f"dead letters: {reasons or 'none'}", style="italic"))
    return Group(title, *(_line(Text(_letter(each))) for each in newest))


def _letter(row: DeadLetterView) -> str:
    return f"{row.topic}:{row.partition}:{row.offset}  {row.reason}  {row.message}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
