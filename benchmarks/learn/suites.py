"""Suites: the order of records, the task boundaries, and the scored records.

| suite | segments |
|---|---|
| superni-1, superni-2 | the first eight of SuperNI's fifteen tasks, in the orders of CP-MoE (arXiv 2605.20247) Table 5; the other seven are never trained on (zero-shot) |
| superni-1-short | those of superni-1's tasks whose prompts are short on average: for searches, which need many runs |
| related | three sentiment tasks, one after another: what they share can be carried over |
| superni-1-bare | superni-1 with the tasks' definitions left out of the prompts |
| trace | TRACE's eight tasks in the standard order |
| long | SuperNI's fifteen tasks and then TRACE's eight, on one adapter budget |
| grouped | eight tasks in groups of two and three, one group after another |
| mixed | eight tasks at random from the first record to the last |
| images | nine kinds of questions about images (`backbones/image_tasks`), on `builtin:nano-vl` |
| commits | a stream that nobody cut: commits of eight repositories in the order of their time, changed files -> subject line |
| commits-bare | the same without the instruction in the prompts |
| commits-order-1, -2, commits-bare-order-1, -2 | each repository on the timeline of the first, second after it by name |

A folder of task files is a suite as well: its tasks one after another, by name or in a given order.

The rows of a training file are shuffled in an order that depends on neither seed nor size. The last `DEVELOPMENT` of
them, or fewer where the draw would not be left enough, but at least an eighth, are development records: settings are
chosen on them, and they are never trained on. Training records are drawn from the others by seed. A row whose input
also occurs among the development records is drawn by no seed. Test files are opened only to score the test split. Of
commits, every eighth record of the training file is a development record, and the drawn ones stay in the order of their
time.
"""  # noqa: E501 - a table row is one line

import random
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.backbones import image_tasks
from benchmarks.data import Split as FileSplit
from benchmarks.data import answer_of, read_rows, to_chat, to_record
from benchmarks.learn.scores import Metric, Reference, metric_of
from streamlearn.errors import UsageError
from streamlearn.settings import LearnerSettings
from streamlearn.stream.decode import Decoder

T = TypeVar("T")
Json = dict[str, Any]
Split = Literal["development", "test"]
"""Which records of a task are scored."""
Prompts = Literal["plain", "chat"]
DEVELOPMENT = 50
"""Maximum development records per task."""
GAP = " ... "
"""Stands for what was cut out of a prompt."""
EVERY = 8
"""Of a task's rows at least, and of the commits exactly, one in so many is a development record."""
COMMIT_SEGMENTS = 8
"""Segments of equal length of the stream of commits."""
LABEL_METRICS = ("exact_match", "choice")
"""Metrics of tasks that ask for a label."""

ORDER_1 = ("task1572", "task363", "task1290", "task181", "task002", "task1510", "task639", "task1729")
SHORT_1 = ("task1572", "task363", "task181", "task1510", "task639", "task1729")
UNSEEN_1 = ("task073", "task1590", "task748", "task511", "task591", "task1687", "task875")
ORDER_2 = ("task748", "task073", "task1590", "task639", "task1572", "task1687", "task591", "task363")
UNSEEN_2 = ("task1510", "task1729", "task181", "task511", "task002", "task1290", "task875")
RELATED = ("task1687", "task363", "task875")
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
_PARAGRAPH = re.compile(r"Paragraph:\n(.*)\n\nSimplification:$", re.DOTALL)
"""The text to simplify in a prompt of TRACE's 20Minuten."""


@dataclass(frozen=True)
class Draw:
    """The selection of records that a suite is built from."""

    folders: Sequence[Path]
    """Folders of task files."""
    records: int = 100
    """Maximum training records per task."""
    evaluated: int = 50
    """Maximum scored records per task, taken from the start of the split."""
    seed: int = 0
    """Seed for the choice and the order of the training records."""
    split: Split = "test"
    prompts: Prompts = "plain"


@dataclass(frozen=True)
class TaskSegment:
    """Consecutive records of one task or of a mixture of tasks."""

    tasks: tuple[str, ...]
    records: tuple[Json, ...]


@dataclass(frozen=True)
class TaskRecords:
    """The records of one task, each with its reference."""

    train: tuple[Json, ...]
    """Those of unseen tasks are not in the stream: they only tell how answers look."""
    train_references: tuple[Reference, ...]
    scored: tuple[Json, ...]
    references: tuple[Reference, ...]
    metric: Metric


@dataclass(frozen=True)
class Suite:
    """A stream and the records of its tasks."""

    name: str
    segments: tuple[TaskSegment, ...]
    tasks: Mapping[str, TaskRecords]
    """In stream order and then `unseen`."""
    unseen: tuple[str, ...] = ()
    """Tasks with scored records that are not in the stream."""
    backbone: str | None = None
    """The model that this suite needs; None: any text model."""
    checkpoints: frozenset[int] = field(default_factory=frozenset)
    """Segments after which every task seen so far is evaluated.

    After any other segment only its own tasks and those of the next segment are evaluated.
    """
    split: Split = "test"
    """Where the scored records come from."""
    only_at_end: bool = False
    """Whether nothing is evaluated before the end of the stream."""
    answered: bool = True
    """Whether free answers are decoded and scored; if not, only teacher-forced losses and accuracies are."""
    uncut: bool = False
    """Whether every task may occur in every segment: each has a regime of its own, and segments only say when to
    evaluate."""

    @property
    def boundaries(self) -> list[int]:
        """Index of the first record of every segment but the first."""
        ends, total = [], 0
        for segment in self.segments[:-1]:
            total += len(segment.records)
            ends.append(total)
        return ends

    @property
    def ends(self) -> dict[str, int]:
        """The last segment of each task of the stream."""
        return {task: number for number, segment in enumerate(self.segments) for task in segment.tasks}

    def evaluated_after(self, number: int) -> list[str]:
        """Return the tasks to evaluate after segment `number`, each once."""
        last = number == len(self.segments) - 1
        if self.only_at_end and not last:
            return []
        everything = last or number in self.checkpoints
        segments = self.segments[: number + 1] if everything else self.segments[number : number + 1]
        tasks = [task for segment in segments for task in segment.tasks]
        tasks += self.unseen if last else self.segments[number + 1].tasks
        return list(dict.fromkeys(tasks))

    def scored_at_end(self) -> "Suite":
        """Return the suite without evaluation before the end of the stream, and without unseen tasks."""
        seen = {task: records for task, records in self.tasks.items() if task not in self.unseen}
        return replace(self, tasks=seen, unseen=(), only_at_end=True)

    @property
    def record_tasks(self) -> list[str]:
        """The task of every training record, in stream order."""
        return [_task_of(record) for segment in self.segments for record in segment.records]

    def regime_slots(self) -> tuple[list[list[int]], dict[str, int]]:
        """Return the slots of the records of each segment, equal for equal tasks, and the last slot of each task."""
        if self.uncut:
            by_task = {task: slot for slot, task in enumerate(self.ends)}
            return [[by_task[_task_of(record)] for record in segment.records] for segment in self.segments], by_task
        known: dict[tuple[str, ...], int] = {}
        slots = [known.setdefault(segment.tasks, len(known)) for segment in self.segments]
        by_task = {task: slot for segment, slot in zip(self.segments, slots, strict=True) for task in segment.tasks}
        return [[slot] * len(segment.records) for segment, slot in zip(self.segments, slots, strict=True)], by_task

    def shuffled(self, seed: int | str) -> list[TaskSegment]:
        """Return as many segments of the same lengths, each with records of all tasks."""
        records: list[Json] = [record for segment in self.segments for record in segment.records]
        random.Random(f"joint {seed}").shuffle(records)
        remaining = iter(records)
        return [replace(segment, records=tuple(next(remaining) for _ in segment.records)) for segment in self.segments]

    def with_sample_types(self, settings: LearnerSettings) -> "Suite":
        """Return the suite with the type of each training record in its field `sample_type`: label or text.

        LoRAMoE's localized balancing (arXiv 2312.09979) separates downstream tasks from questions about world
        knowledge. The suites have no such parts; labels and texts are the two kinds of tasks that they do have.
        """
        label, text = settings.sample_types
        types: dict[str, str] = {}
        for records in self.tasks.values():
            types |= dict.fromkeys(map(_task_of, records.train), label if records.metric in LABEL_METRICS else text)
        return replace(self, segments=_mapped(self.segments, lambda record: _typed(record, types)))


def _task_of(record: Json) -> str:
    task: str = record.get("meta", {}).get("task", "")
    return task


def _typed(record: Json, types: Mapping[str, str]) -> Json:
    sample_type = types.get(_task_of(record))
    return record if sample_type is None else {**record, "sample_type": sample_type}


def _mapped(segments: Sequence[TaskSegment], change: Callable[[Json], Json]) -> tuple[TaskSegment, ...]:
    return tuple(replace(segment, records=tuple(map(change, segment.records))) for segment in segments)


def sequential(name: str, draw: Draw, tasks: Sequence[str], unseen: Sequence[str] = (), *, bare: bool = False) -> Suite:
    """Build a suite of one task after another; `bare` leaves the tasks' definitions out of the prompts."""
    records = {task: read_text_task(draw, task, bare=bare) for task in (*tasks, *unseen)}
    segments = tuple(TaskSegment((task,), records[task].train) for task in tasks)
    return Suite(name, segments, records, tuple(unseen), split=draw.split)


def grouped(draw: Draw, tasks: Sequence[str] = ORDER_1, widths: Sequence[int] = (2, 3), name: str = "grouped") -> Suite:
    """Build a suite of task groups whose sizes alternate between `widths`; each group's records are shuffled."""
    records = {task: read_text_task(draw, task) for task in tasks}
    segments: list[TaskSegment] = []
    remaining = list(tasks)
    while remaining:
        number, width = len(segments), widths[len(segments) % len(widths)]
        group, remaining = remaining[:width], remaining[width:]
        mixture = [record for task in group for record in records[task].train]
        random.Random(f"{draw.seed} {number}").shuffle(mixture)
        segments.append(TaskSegment(tuple(group), tuple(mixture)))
    return Suite(name, tuple(segments), records, split=draw.split)


def long(draw: Draw) -> Suite:
    """Build a suite of 23 tasks on one adapter budget; all tasks seen are evaluated after 8, 15 and 23 of them."""
    suite = sequential("long", draw, (*ORDER_1, *UNSEEN_1, *TRACE))
    return replace(suite, checkpoints=frozenset({7, 14, 22}))


def images(draw: Draw) -> Suite:
    """Build a suite of questions about images, one kind after another; prompts are always plain."""
    home = next((folder for folder in draw.folders if (folder / "cifar10.npz").exists()), None)
    if home is None:
        raise UsageError(
            "--data: suite images needs the folder of image sets that benchmarks.backbones.image_tasks describes, "
            f"found no cifar10.npz in {', '.join(map(str, draw.folders))}"
        )
    records = {task: read_image_task(draw, home, task) for task in image_tasks.TASKS}
    segments = tuple(TaskSegment((task,), own.train) for task, own in records.items())
    return Suite("images", segments, records, backbone="builtin:nano-vl", split=draw.split)


def commits(draw: Draw, *, bare: bool = False, order: int = 0) -> Suite:
    """Build the stream of commits; its tasks are the repositories, which come and go and are mixed at changing rates.

    With another `order`, a repository's i-th record takes the place of the i-th record of another repository.

    Raises:
        UsageError: no folder holds the commits.
    """
    form = "commits.bare" if bare else "commits.told"
    rows = _commit_rows(draw, form, "train")
    development = rows[EVERY - 1 :: EVERY]
    scored = development if draw.split == "development" else _commit_rows(draw, form, "test")
    reserved = {_input_of(row) for row in development}
    pool = [row for row in rows if _input_of(row) not in reserved]
    tasks = {}
    for name in sorted({row["task"] for row in rows}):
        own, own_scored = ([row for row in part if row["task"] == name] for part in (pool, scored))
        tasks[name] = _task_records(draw, name, own, own_scored, partial(_commit, prompts=draw.prompts), _reference)
    trains = [sorted(records.train, key=_place) for records in tasks.values()]
    timelines = [[_place(record) for record in train] for train in trains]
    placed = [
        (timeline[i * len(timeline) // len(train)], record)  # a draw may be smaller than that of the other repository
        for train, timeline in zip(trains, timelines[order:] + timelines[:order], strict=True)
        for i, record in enumerate(train)
    ]
    stream = [record for _, record in sorted(placed, key=itemgetter(0))]
    ends = [len(stream) * number // COMMIT_SEGMENTS for number in range(COMMIT_SEGMENTS + 1)]
    segments = tuple(TaskSegment(tuple(tasks), tuple(stream[start:end])) for start, end in pairwise(ends))
    suffix = ("-bare" if bare else "") + (f"-order-{order}" if order else "")
    return Suite(f"commits{suffix}", segments, tasks, split=draw.split, uncut=True)


def _commit_rows(draw: Draw, form: str, split: FileSplit) -> list[dict[str, Any]]:
    return [
        {**row, "task": row["meta"]["repo"], "id": f"{number}", "answer": row["completion"]}
        for number, row in enumerate(_rows(draw, form, split))
    ]


def _commit(row: Mapping[str, Any], prompts: Prompts) -> Json:
    record = to_chat(row) if prompts == "chat" else to_record(row) | {"completion": row["completion"]}  # space kept
    return {**record, "meta": {**record["meta"], "time": row["meta"]["time"]}}


def _place(record: Json) -> int:
    """A commit's place in its file."""
    return int(record["meta"]["id"])


_SEQUENCES: Mapping[str, tuple[Sequence[str], Sequence[str], bool]] = {
    "superni-1": (ORDER_1, UNSEEN_1, False),
    "superni-2": (ORDER_2, UNSEEN_2, False),
    "superni-1-short": (SHORT_1, (), False),
    "related": (RELATED, (), False),
    "superni-1-bare": (ORDER_1, UNSEEN_1, True),
    "trace": (TRACE, (), False),
}
"""Name -> tasks, unseen tasks, and whether the definitions are left out."""
_OTHERS: Mapping[str, Callable[[Draw], Suite]] = {
    "long": long,
    "grouped": grouped,
    "mixed": lambda draw: grouped(draw, widths=(len(ORDER_1),), name="mixed"),
    "images": images,
    **{
        f"commits{form}{f'-order-{order}' if order else ''}": partial(commits, bare=bool(form), order=order)
        for form in ("", "-bare")
        for order in range(3)
    },
}
SUITES = (*_SEQUENCES, *_OTHERS)


def make_suite(suite: str, draw: Draw, order: Sequence[str] = ()) -> Suite:
    """Build a suite by name, or from a folder of task files: by name, or in the given order.

    Raises:
        UsageError: the folder holds no task files, or not those of a task in `order`.
    """
    if suite in _SEQUENCES:
        tasks, unseen, bare = _SEQUENCES[suite]
        return sequential(suite, draw, tasks, unseen, bare=bare)
    if suite in _OTHERS:
        return _OTHERS[suite](draw)
    folder = Path(suite)
    names = sorted(file.name.removesuffix(".train.jsonl.gz") for file in folder.glob("*.train.jsonl.gz"))
    if not names:
        raise UsageError(f"{folder} must hold task files NAME.train.jsonl.gz and NAME.test.jsonl.gz, found none")
    return sequential(folder.resolve().name, replace(draw, folders=[folder]), order or names)


def read_text_task(draw: Draw, task: str, *, bare: bool = False) -> TaskRecords:
    """Read a task's files; `bare` leaves its definition out of the prompts.

    Raises:
        UsageError: no folder holds the task's file, or it has no records left to score.
    """
    pool, development = divide(_rows(draw, task, "train"), draw.records, _input_of)
    scored = development if draw.split == "development" else _rows(draw, task, "test")
    convert = to_chat if draw.prompts == "chat" else to_record
    return _task_records(draw, task, pool, scored, lambda row: convert(row, bare=bare), _reference)


def read_image_task(draw: Draw, home: Path, task: str) -> TaskRecords:
    """Read questions about images; they have prompts and completions, whatever the draw says."""
    rows = list(image_tasks.records(home, task, "train"))
    pool, development = divide(rows, draw.records, lambda row: (row["prompt"], row["image"]))
    scored = development
    if draw.split == "test":
        scored = list(image_tasks.records(home, task, "test"))
        random.Random(f"tests {task}").shuffle(scored)  # the files are sorted by class
    return _task_records(draw, task, pool, scored, dict, lambda record: Reference((record["meta"]["answer"],)))


def divide(rows: Sequence[T], records: int, input_of: Callable[[T], Hashable]) -> tuple[list[T], list[T]]:
    """Return the rows to draw training records from, and the development rows; they have no input in common.

    Args:
        rows: All rows of a training file.
        records: Number of training records; so many rows are left to draw from, or seven eighths if there are fewer.
        input_of: Key of a row's input; rows with one key ask the same.
    """
    order = list(rows)
    random.Random("development").shuffle(order)
    size = min(DEVELOPMENT, max(len(order) - records, len(order) // EVERY))
    others, development = order[: len(order) - size], order[len(order) - size :]
    reserved = {input_of(row) for row in development}
    return [row for row in others if input_of(row) not in reserved], development


def _task_records(
    draw: Draw,
    task: str,
    pool: Sequence[Json],
    scored: Sequence[Json],
    convert: Callable[[Json], Json],
    reference: Callable[[Json], Reference],
) -> TaskRecords:
    train = list(pool)
    random.Random(f"{draw.seed} {task}").shuffle(train)
    train, scored = train[: draw.records], scored[: draw.evaluated]
    if not scored:
        raise UsageError(
            f"{task}: no {draw.split} records are left beside {len(train)} training records: lower --records-per-task"
        )
    return TaskRecords(
        tuple(map(convert, train)),
        tuple(map(reference, train)),
        tuple(map(convert, scored)),
        tuple(map(reference, scored)),
        metric_of(task, [reference(row).answers[0] for row in pool]),
    )


def _rows(draw: Draw, task: str, split: FileSplit) -> list[dict[str, Any]]:
    """Read from the folder that holds the task, or fail with the message of the last folder."""
    home = next((f for f in draw.folders if any(f.glob(f"{task}*.{split}.jsonl.gz"))), draw.folders[-1])
    try:
        return list(read_rows(home, task, split))
    except FileNotFoundError as error:
        raise UsageError(f"{error}; pass every folder that the suite needs with --data") from error


def _input_of(row: Mapping[str, Any]) -> str:
    return str(row["prompt"] if "prompt" in row else row["input"]).casefold()


def _reference(row: Mapping[str, Any]) -> Reference:
    answers = [answer_of(row), *(str(other).strip() for other in row.get("references", ()))]
    paragraph = _PARAGRAPH.search(row.get("prompt", ""))
    return Reference(tuple(dict.fromkeys(answers)), paragraph[1] if paragraph else "")


def shortened(suite: Suite, decoder: Decoder, max_tokens: int) -> Suite:
    """Return the suite with every record at most `max_tokens` long; records with images are left as they are.

    TRACE's long prompts have the instruction at their head and the cue for the answer at their tail; so have SuperNI's.
    Truncation of the stream would take away the head. Here a prompt loses its middle, as in LongBench (arXiv
    2308.14508). A prompt may have `max_tokens` less the tokens of its task's longest training answer, of which at most
    a quarter of `max_tokens` is kept free: the same for every record of a task, so that no prompt tells how long its
    answer is. An answer for which there is still no space loses its end; references keep it.

    Args:
        suite: What to shorten.
        decoder: A decoder that does not truncate.
        max_tokens: Maximum tokens of prompt and answer.
    """
    known: dict[int, Json] = {}

    def change(records: Iterable[Json], prompt_tokens: int) -> tuple[Json, ...]:
        known.update({id(record): _shorten(record, decoder, max_tokens, prompt_tokens) for record in records})
        return tuple(known[id(record)] for record in records)

    tasks = {}
    for task, own in suite.tasks.items():
        examples = [decoder.decode_value(record) for record in own.train if "image" not in record]
        longest = max((len(example) - example.prompt_length for example in examples), default=0)
        prompt_tokens = max_tokens - min(longest, max_tokens // 4)
        tasks[task] = replace(own, train=change(own.train, prompt_tokens), scored=change(own.scored, prompt_tokens))
    return replace(suite, segments=_mapped(suite.segments, lambda record: known[id(record)]), tasks=tasks)


def _shorten(record: Json, decoder: Decoder, max_tokens: int, prompt_tokens: int) -> Json:
    if "image" in record:
        return record
    example = decoder.decode_value(record)
    if example.prompt_length <= prompt_tokens and len(example) <= max_tokens:
        return record
    prompt, answer = _texts(record)
    if example.prompt_length > prompt_tokens:

        def fits(size: int) -> bool:
            short = _with_texts(record, without_middle(prompt, size), "a")
            return decoder.decode_value(short).prompt_length <= prompt_tokens

        shorter = without_middle(prompt, _largest(len(prompt), fits))
    else:
        shorter = prompt

    def length(end: int) -> int:
        return len(decoder.decode_value(_with_texts(record, shorter, answer[:end])))

    if length(len(answer)) > max_tokens:
        answer = answer[: _largest(len(answer), lambda end: length(end) <= max_tokens)]
    return _with_texts(record, shorter, answer)


def _texts(record: Json) -> tuple[str, str]:
    if "messages" in record:
        user, assistant = record["messages"]
        return user["content"], assistant["content"]
    return record["prompt"], record["completion"]


def _with_texts(record: Json, prompt: str, answer: str) -> Json:
    if "messages" in record:
        user, assistant = record["messages"]
        return {**record, "messages": [{**user, "content": prompt}, {**assistant, "content": answer}]}
    return {**record, "prompt": prompt, "completion": answer}


def without_middle(text: str, size: int) -> str:
    """Return a text's first and last characters, `size` together, around `GAP`.

    >>> without_middle("one two three four", 8)
    'one  ... four'
    """
    head = size // 2
    return text[:head] + GAP + text[len(text) - (size - head) :]


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits, if smaller ones fit too; 1 is not tried."""
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
