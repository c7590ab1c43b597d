"""The watch command: the daemon at a glance in a terminal, for as long as one looks."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import orjson
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamlearn.cli.client import Endpoint, understood
from streamlearn.cli.options import load_settings
from streamlearn.cli.status import FittedColumn, FittedTable
from streamlearn.errors import SourceError, UsageError
from streamlearn.serve.models import (
    DeadLetterView,
    HistoryView,
    PointColumns,
    RegimesView,
    SegmentView,
    ShiftsView,
    StatusView,
)
from streamlearn.status import RegimeStatus, ShiftStatus

MAX_DEAD_LETTERS = 32


class HistoryCopy:
    """Everything that the answers so far add up to."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self.points = PointColumns.of(())
        self.segments: list[SegmentView] = []
        self.dead_letters: list[DeadLetterView] = []

    @property
    def path(self) -> str:
        """What to ask for next."""
        return "/v1/history" if self.cursor is None else f"/v1/history?since={self.cursor}"

    def update(self, body: bytes) -> None:
        """Add an answer to `path`."""
        answer = HistoryView.model_validate(orjson.loads(body))
        if answer.complete:
            self.points, self.segments = answer.points, list(answer.segments)
            self.dead_letters = list(answer.dead_letters)
        else:
            self.points = _joined(self.points, answer.points)
            self.segments = [*_before(self.segments, answer.segments), *answer.segments]
            self.dead_letters = [*self.dead_letters, *answer.dead_letters][-MAX_DEAD_LETTERS:]
        self.cursor = answer.cursor


def _joined(old: PointColumns, new: PointColumns) -> PointColumns:
    """The old points before the first new one, and the new ones."""
    if not new.step:
        return old
    begin = new.step[0] - new.batches[0]
    kept = sum(step <= begin for step in old.step)
    columns: dict[str, list[Any]] = {
        name: [*getattr(old, name)[:kept], *getattr(new, name)] for name in PointColumns.model_fields
    }
    return PointColumns(**columns)


def _before(old: Sequence[SegmentView], new: Sequence[SegmentView]) -> list[SegmentView]:
    return [each for each in old if not new or each.last_record < new[0].first_record]


TIMEOUT_S = 5.0  # an answer takes milliseconds; a busy machine may delay it a few hundred times
REGIMES_EVERY_S = 10.0  # with many regimes this answer is the longest, and hold-out scores change slowly
_ADVICE = "start it with `streamlearn run`, or read its log"

View = TypeVar("View", bound=BaseModel)


class WatchedDaemon:
    """Asks the daemon again and again; what it answered last stays while it is away."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = endpoint
        self.history = HistoryCopy()
        self.status: StatusView | None = None
        self.regimes: RegimesView | None = None
        self.shifts: ShiftsView | None = None
        self.fault = ""
        """Why the daemon did not answer; empty while it does."""
        self._clock = clock
        self._away_since: float | None = None
        self._asked_at = -REGIMES_EVERY_S

    @property
    def away_s(self) -> float:
        """Seconds for which the daemon has not answered."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def ask(self) -> None:
        """Get what changed.

        Raises:
            SourceError: no daemon answers.
            UsageError: it refuses to, or is no daemon of this release.
        """
        status = self._get(StatusView, "/v1/status")
        history = self._request(self.history.path)
        with understood(self.endpoint.url + self.history.path):
            self.history.update(history)
        if self._is_due(status):
            self.regimes = self._get(RegimesView, "/v1/regimes")
            self.shifts = self._get(ShiftsView, "/v1/shifts")
            self._asked_at = self._clock()
        self.status = status
        self.fault, self._away_since = "", None

    def ask_if_there(self) -> None:
        """Get what changed, or note that the daemon is away.

        Raises:
            UsageError: it refuses to answer, or is no daemon of this release.
        """
        try:
            self.ask()
        except SourceError as error:
            self.fault = str(error)
            self._away_since = self._clock() if self._away_since is None else self._away_since

    def _is_due(self, status: StatusView) -> bool:
        """Whether regimes and shifts are to be asked for: at once after a shift, else now and then."""
        old = self.status
        if old is None or self._clock() - self._asked_at >= REGIMES_EVERY_S:
            return True
        return (old.num_shifts, old.current_regime) != (status.num_shifts, status.current_regime)

    def _get(self, view: type[View], path: str) -> View:
        answer = self._request(path)
        with understood(self.endpoint.url + path):
            return view.model_validate_json(answer)

    def _request(self, path: str) -> bytes:
        return self.endpoint.request(path, advice=_ADVICE, timeout_s=TIMEOUT_S)


DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell's dots, by row and column (Unicode, block U+2800)."""
_BRAILLE = 0x2800
LOSS_STYLE, BACKBONE_STYLE = "cyan", "yellow"
BACKBONE_MARK = "o"
_LOSS_MARK = "*"
_AXIS = 8  # columns of the terminal left of the chart


@dataclass(frozen=True)
class ChartPoint:
    """A mean over the records from `first` to `last`."""

    first: int
    last: int
    value: float
    weight: float


def column_means(points: Sequence[ChartPoint], first: int, last: int, width: int) -> list[float | None]:
    """Mean of the points in each of `width` equal parts of the records from `first` to `last`; None without any.

    >>> points = [ChartPoint(1, 2, 4.0, 1.0), ChartPoint(3, 4, 2.0, 1.0)]
    >>> column_means(points, 1, 4, 2), column_means(points, 1, 4, 1), column_means(points, 1, 8, 2)
    ([4.0, 2.0], [3.0], [3.0, None])
    """
    sums, weights = [0.0] * width, [0.0] * width
    per_column = (last - first + 1) / width
    for point in points:
        begin = (point.first - first) / per_column
        end = max(begin, (point.last - first + 1) / per_column - 1e-9)
        for column in range(max(0, int(begin)), min(width - 1, int(end)) + 1):
            sums[column] += point.value * point.weight
            weights[column] += point.weight
    return [total / weight if weight else None for total, weight in zip(sums, weights, strict=True)]


@dataclass(frozen=True)
class LossChart:
    """Prequential loss as a line, and the untouched backbone's as marks, told apart without colours too."""

    loss: Sequence[ChartPoint]
    backbone: Sequence[ChartPoint]
    first: int
    """First record at the left edge."""
    last: int
    """Last record at the right edge."""
    height: int
    """Lines of the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(10, options.max_width - _AXIS)
        fine = 1 if options.ascii_only else 2
        loss = column_means(self.loss, self.first, self.last, width * fine)
        backbone = column_means(self.backbone, self.first, self.last, width)
        known = [value for value in (*loss, *backbone) if value is not None]
        low, high = _bounds(known)
        cells = _ascii(loss, low, high, self.height) if options.ascii_only else _braille(loss, low, high, self.height)
        marks = _rows_of(backbone, low, high, self.height)
        for row in range(self.height):
            line = Text(_label(row, self.height, low, high) if known else " " * _AXIS, style="dim")
            for column, mark in enumerate(marks):
                is_backbone = mark == row
                line.append(
                    BACKBONE_MARK if is_backbone else cells[row][column],
                    style=BACKBONE_STYLE if is_backbone else LOSS_STYLE,
                )
            yield line


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value of the axis; never the same."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)


def _row(value: float, low: float, high: float, height: int) -> int:
    """From the top, 0."""
    return min(height - 1, max(0, math.floor((high - value) / (high - low) * height)))


def _rows_of(values: Sequence[float | None], low: float, high: float, height: int) -> list[int | None]:
    return [None if value is None else _row(value, low, high, height) for value in values]


def _lines(values: Sequence[float | None], low: float, high: float, height: int) -> Iterator[tuple[int, int]]:
    """Column and row of every dot: each value, and what connects it with the one before."""
    rows = _rows_of(values, low, high, height)
    for column, (before, row) in enumerate(pairwise([None, *rows])):
        if row is not None:
            start = row if before is None else before + (row > before) - (row < before)
            for each in range(min(start, row), max(start, row) + 1):
                yield column, each


def _braille(values: Sequence[float | None], low: float, high: float, height: int) -> list[list[str]]:
    bits = [[0] * (len(values) // 2) for _ in range(height)]
    for column, row in _lines(values, low, high, height * 4):
        bits[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return [[chr(_BRAILLE + each) if each else " " for each in row] for row in bits]


def _ascii(values: Sequence[float | None], low: float, high: float, height: int) -> list[list[str]]:
    cells = [[" "] * len(values) for _ in range(height)]
    for column, row in _lines(values, low, high, height):
        cells[row][column] = _LOSS_MARK
    return cells


def _label(row: int, height: int, low: float, high: float) -> str:
    """The axis: the highest value at the top, the lowest at the bottom."""
    value = {0: high, height - 1: low}.get(row)
    return " " * _AXIS if value is None else f"{value:{_AXIS - 2}.2f}  "


SYMBOLS = digits[1:] + ascii_letters
COLOURS = ("blue", "green", "magenta", "yellow", "cyan", "red", "bright_blue", "bright_green", "bright_magenta")
_AXIS = 8  # columns of the terminal left of the bar, as of the chart


def symbol(regime: int) -> str:
    """The character of a regime; it comes again after 61 regimes.

    >>> symbol(1), symbol(10), symbol(62)
    ('1', 'a', '1')
    """
    return SYMBOLS[(regime - 1) % len(SYMBOLS)]


def style(regime: int) -> str:
    """The colour of a regime."""
    return f"reverse {COLOURS[(regime - 1) % len(COLOURS)]}"


@dataclass(frozen=True)
class SegmentBar:
    """The segments over the whole width, and the first and last record below them."""

    segments: Sequence[SegmentView]
    first: int
    """First record at the left edge."""
    last: int
    """Last record at the right edge."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(10, options.max_width - _AXIS)
        line = Text(f"{'regime':>{_AXIS - 2}}  ", style="dim")
        for column in range(width):
            record = self.first + (2 * column + 1) * (self.last - self.first + 1) // (2 * width)
            regime = next((each.regime for each in self.segments if each.first_record <= record <= each.last_record), 0)
            line.append(symbol(regime) if regime else " ", style=style(regime) if regime else "")
        yield line
        ends = f"{self.first:,}", f"{self.last:,}"
        gap = max(1, width - len(ends[0]) - len(ends[1]))
        yield Text(f"{'record':>{_AXIS - 2}}  {ends[0]}{' ' * gap}{ends[1]}", style="dim")


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


EVERY_S = 1.0
"""Time between two frames."""


def endpoint_of(config: Path | None, url: str | None) -> Endpoint:
    """The daemon of a configuration, or the one at a URL, which must not need a token.

    Raises:
        UsageError: neither or both are given, or the URL cannot be one of a daemon.
    """
    if (config is None) == (url is None):
        raise UsageError("expected either --config FILE or --url URL")
    if config is not None:
        return Endpoint.of(load_settings(config))
    assert url is not None, "one of the two is given"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(parts):
        raise UsageError(f"--url must be http://HOST:PORT or https://HOST:PORT, found {url}")
    return Endpoint(f"{parts.scheme}://{parts.netloc}")


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def watch(endpoint: Endpoint, console: Console, *, once: bool) -> None:
    """Show a frame every second until Ctrl-C; one frame only if `once`, or if the output is no terminal.

    Raises:
        SourceError: no daemon answers, and there is only one frame.
        UsageError: the daemon refuses to answer, or is none of this release.
    """
    if isinstance(console.file, TextIOWrapper):
        console.file.reconfigure(errors="replace")  # a message may hold what the terminal cannot show
    watched = WatchedDaemon(endpoint)
    if once or not console.is_terminal:
        watched.ask()
        console.print(WatchFrame(watched))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                watched.ask_if_there()
                live.update(WatchFrame(watched), refresh=True)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return
