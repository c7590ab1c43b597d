"""What only a GPU can show: speed beside stock PEFT, the tests that need CUDA, kills, and order 1 at 300 records.

    python -m benchmarks.gpu --backbone FOLDER --data ../shared/data/superni     # again, until nothing is missing
    python -m benchmarks.gpu --tiny --out build/tiny.json                        # the same code, small, on a CPU too

A call ends after `--minutes`. Each measurement is written to `--out` when it is done; the next call makes those that
are missing. One that failed is kept with its error: delete it from the file to repeat it. A file is of one device.

Speed: training steps of an arm in its own process, on a random Qwen3 with the named shape, of records of random tokens
that are equally long, so that stock PEFT, which pads, loses nothing. `stock_peft` is PEFT's LoRA in transformers'
`Trainer`, with the rank and the targets of `lora`; the other arms are those of `speed_arms`. A token takes

    4 N + 6 P + 6 L H E S    floating-point operations                                                     (1)

with N weights in the frozen linears (2 N forward, 2 N for the gradients of their inputs), P activated parameters of the
adapter, and L layers of H heads of size E that attend to S / 2 tokens on average. `share_of_peak` is eq. (1) times
tokens/s, divided by the rate of a product of two square matrices on the same device: measured, not the data sheet's.
`peak_mib` contains the backbone.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import torch
from transformers import Qwen3Config

from benchmarks.learn.jobs import Part, RunConditions, jobs_of, make_runs
from benchmarks.learn.run import code_commit
from benchmarks.learn.scores import scores
from benchmarks.measuring import (
    ERROR_LINES,
    MeasurementError,
    OutOfTimeError,
    command,
    grid,
    in_own_process,
    parser,
    peak_mib,
    positive_float,
    show,
)
from benchmarks.speed_arms import build_arm, lora_as_large_as, random_backbone
from streamlearn.adapters.presets import linear_shapes, resolve
from streamlearn.backbone.load import device_of
from streamlearn.errors import UsageError
from streamlearn.settings import AdapterSettings, BackboneSettings
from streamlearn.stream.record import Batch, Example

Rows = dict[str, Any]


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, **others: Any) -> Qwen3Config:
    return Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, **others},
    )


SHAPES: Mapping[str, Qwen3Config] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "tiny": _qwen3(2, 64, 128, 4, num_key_value_heads=2, head_dim=16, vocab_size=256),
}
WORK, TINY_WORK = (12, 16, 512), (3, 2, 16)
"""Steps, records of a step and tokens of a record."""
PRODUCT, TINY_PRODUCT = 8192, 64
"""Rows of the matrices that are multiplied to find the device's rate."""
STOCK = "stock_peft"
SPEED_ARMS = ("frozen_floor", STOCK, "lora", "streamlearn")
WARM_UP = 2
"""Steps before those that are timed."""
METHODS = ("streamlearn", "lora", "er", "cp-moe", "lora-per-task", "joint")
SIDE_BY_SIDE = 3
"""Runs of order 1 that share the GPU."""
TESTS = "tests/**/test_*_on_gpu.py"
LEAST_S = 20.0
"""Nothing is started in a call's last seconds."""


def speed_of(shape: str, arm: str, seconds: float) -> Rows:
    """Measure an arm in its own process."""
    return in_own_process("benchmarks.gpu", {"shape": shape, "arm": arm}, timeout_s=seconds)


def measure_arm(shape: str, arm: str) -> Rows:
    """Take training steps in this process."""
    config, device = SHAPES[shape], device_of(BackboneSettings())
    rate = product_rate(TINY_PRODUCT if shape == "tiny" else PRODUCT, device)
    size = TINY_WORK if shape == "tiny" else WORK
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=size, dtype=np.int32)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = random_backbone(config, device)
    shapes = linear_shapes(model)
    weights = sum(rows * columns for rows, columns in shapes.values()) + model.get_output_embeddings().weight.numel()
    if arm == STOCK:
        parameters, ends = stock_steps(model, tokens, shapes)
    else:
        with tempfile.TemporaryDirectory() as evicted:
            built = build_arm(arm, lambda: model, Path(evicted))
            parameters, ends = built.parameters, [_now(device)]
            for step in tokens:
                built.step(Batch((), tuple(Example(ids, ids) for ids in step)))
                ends.append(_now(device))
    seconds = median(end - begin for begin, end in list(pairwise(ends))[WARM_UP:])
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens.shape[2]
    speed = tokens[0].size / seconds
    return {
        "tokens_per_s": round(speed, 1),
        "share_of_peak": round(speed * (4 * weights + 6 * parameters + 6 * attention) / rate, 4),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else peak_mib(), 1),
        "parameters": parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "product_tflops": round(rate / 1e12, 3),
    }


def stock_steps(model: Any, tokens: np.ndarray[Any, Any], shapes: Any) -> tuple[int, list[float]]:
    """Train PEFT's LoRA in transformers' `Trainer`; return its parameters and the time after each step."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - slow, and only this arm needs them
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

    device, is_half = model.device, model.dtype == torch.bfloat16
    model.set_attn_implementation("sdpa")  # transformers' default
    own = lora_as_large_as(resolve(AdapterSettings(preset="mh-moe")), shapes)
    config = LoraConfig(r=own.r, lora_alpha=own.alpha, target_modules=own.target_modules, task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    ends = [_now(device)]

    class Times(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(_now(device))

    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=tokens.shape[1],
            max_steps=len(tokens),
            bf16=is_half,
            use_cpu=device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.from_numpy(tokens).long().flatten(0, 1)]
        Trainer(model=peft, args=arguments, train_dataset=rows, callbacks=[Times()]).train()
    return sum(weight.numel() for weight in peft.parameters() if weight.requires_grad), ends


def product_rate(size: int, device: torch.device) -> float:
    """Floating-point operations per second of a product of two matrices; bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(10):
        started = _now(device)
        left @ right
        seconds.append(_now(device) - started)
    return 2 * size**3 / median(seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def outcomes(file: str, seconds: float) -> Rows:
    """Run a file of tests; return each test's outcome."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = finish(["pytest", "-p", "no:cacheprovider", f"--junitxml={report}", file], seconds)
        if not report.exists():
            raise MeasurementError("\n".join((done.stdout + done.stderr).splitlines()[-ERROR_LINES:]))
        cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - pytest has just written it
        return {case.get("name", ""): _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    notes = (f"{note.tag}: {note.get('message')}" for note in case if note.tag in {"failure", "error", "skipped"})
    return next(notes, "passed")


def crashes(kills: int, seconds: float) -> Rows:
    """Kill daemons that read a file; no broker is needed."""
    done = finish(["tests.crash", "--files", "--kills", str(kills)], seconds)
    if not done.stdout:
        raise MeasurementError("\n".join(done.stderr.splitlines()[-ERROR_LINES:]))
    return {**orjson.loads(done.stdout), "nothing_lost_repeated_or_changed": done.returncode == 0}


def finish(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS`; when time is up, kill it and all processes that it started."""
    run = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise OutOfTimeError(f"{arguments[0]}: not done after {seconds:.0f} s") from error
            raise
    return subprocess.CompletedProcess(run, process.returncode, out, err)


class Kit:
    """The file of results, and the time that is left in this call."""

    def __init__(self, out: Path, minutes: float, *, tiny: bool) -> None:
        self.deadline = time.monotonic() + 60 * minutes
        self._out = out
        device = device_of(BackboneSettings())
        name = (torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu") + (", tiny" if tiny else "")
        self.result: Rows = orjson.loads(out.read_bytes()) if out.exists() else {"device": name, "commits": []}
        commits = {*self.result["commits"], code_commit()}
        self.result |= {"torch": torch.__version__, "commits": [*commits], "missing": {}}
        if self.result["device"] != name:
            raise UsageError(f"--out {out}: has results of {self.result['device']}, this is {name}; name another file")

    def measure(self, section: str, name: str, make: Callable[[float], Rows]) -> None:
        """Make a measurement that is not in the file, within the seconds that are left."""
        rows = self.result.setdefault(section, {})
        if name in rows:
            return
        left = self.deadline - time.monotonic()
        started = time.monotonic()
        try:
            if left < LEAST_S:
                raise OutOfTimeError("no time was left")
            rows[name] = make(left)
        except OutOfTimeError as error:
            self.result["missing"][f"{section} {name}"] = str(error)
        except MeasurementError as error:
            rows[name] = {"error": str(error)}
        print(f"{section} {name}  {time.monotonic() - started:.0f} s", file=sys.stderr)
        self.save()

    def learn(self, conditions: RunConditions, methods: Sequence[str], seeds: Sequence[int]) -> None:
        """Make the runs that are not in the folder of runs, and keep the scores of all."""
        jobs = jobs_of([Part(suites=["superni-1"], methods=[*methods], seeds=[*seeds])], conditions)
        if self.deadline - time.monotonic() >= LEAST_S:
            make_runs(jobs, side_by_side=SIDE_BY_SIDE, tell=partial(print, file=sys.stderr), deadline=self.deadline)
        rows = self.result["learn"] = {}
        for job in jobs:
            name = f"{job.method} {job.seed}"
            if job.file.exists():
                run = orjson.loads(job.file.read_bytes())
                stated = {key: run[key] for key in ("seconds", "tokens_per_s", "peak_memory_mib", "device")}
                rows[name] = {**asdict(scores(run)), **stated, "commit": run["versions"]["commit"]}
            else:
                self.result["missing"][f"learn {name}"] = "not made in time, or it failed"
        self.save()

    def save(self) -> None:
        """Replace the file, so that it is whole at any moment."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        partial = self._out.with_suffix(".tmp")
        partial.write_bytes(orjson.dumps(self.result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        partial.replace(self._out)


def measure(given: Any) -> Rows:
    """Make what is missing, in the order of worth, until the time is up."""
    kit = Kit(given.out, given.minutes, tiny=given.tiny)
    for file in sorted(map(str, Path().glob(TESTS))):
        kit.measure("tests", file, partial(outcomes, file))
    for shape in ("tiny",) if given.tiny else ("qwen3-0.6b", "qwen3-8b"):
        for arm in SPEED_ARMS:
            kit.measure("speed", f"{shape} {arm}", partial(speed_of, shape, arm))
    kills = 1 if given.tiny else 10
    kit.measure("crash", f"{kills} kills", partial(crashes, kills))
    if given.data is None or (given.backbone is None and not given.tiny):
        kit.result["missing"]["learn"] = "needs --data and --backbone"
        kit.save()
        return kit.result
    conditions = RunConditions(
        data=(str(given.data.resolve()),),
        out=str(given.out.resolve().with_suffix("")),
        profile="nano" if given.tiny else given.profile,
        backbone=str(given.backbone.resolve()) if given.backbone else None,
        records=2 if given.tiny else 300,
        evaluated=1 if given.tiny else 50,
    )
    kit.learn(conditions, METHODS[1:2] if given.tiny else METHODS, range(1 if given.tiny else 3))
    return kit.result


def tables(result: Rows) -> list[Any]:
    """Return what a person reads: a table per section, and what is missing."""
    speed = ("tokens_per_s", "share_of_peak", "peak_mib", "parameters", "dtype", "product_tflops", "error")
    learn = ("AP", "AF", "BWT", "ZST", "prequential_loss", "tokens_per_s", "peak_memory_mib", "seconds")
    tests = {
        f"{Path(file).stem}: {test}": {"outcome": outcome}
        for file, rows in result.get("tests", {}).items()
        for test, outcome in rows.items()
    }
    crash = {kills: {name: f"{value}" for name, value in row.items()} for kills, row in result.get("crash", {}).items()}
    return [
        f"{result['device']}, torch {result['torch']}",
        grid(result.get("speed", {}), speed, "speed"),
        grid(tests, ["outcome"], "tests"),
        *(grid({name: {"value": row[name]} for name in row}, ["value"], kills) for kills, row in crash.items()),
        grid(result.get("learn", {}), learn, "order 1"),
        grid({name: {"why": why} for name, why in result["missing"].items()}, ["why"], "missing")
        if result["missing"]
        else "nothing is missing",
    ]


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(orjson.dumps(measure_arm(**orjson.loads(sys.argv[1]))).decode())
        return
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="results; runs are in build/gpu")
    options.add_argument("--minutes", type=positive_float, default=9.0, help="of this call")
    options.add_argument("--backbone", type=Path, help="folder of the causal language model that learns order 1")
    options.add_argument("--data", type=Path, help="folder of SuperNI's task files")
    options.add_argument("--profile", default="smollm2", help="as in benchmarks.learn")
    options.add_argument("--tiny", action="store_true", help="small shapes and few records; needs no GPU")
    given = options.parse_args()
    if not (given.tiny or torch.cuda.is_available()):
        raise UsageError("no CUDA device is visible: run this where there is one, or add --tiny")
    result = measure(given)
    show(result, *tables(result), as_json=given.json, width=None if sys.stdout.isatty() else 160)


if __name__ == "__main__":
    command(main)
