"""Every regime of a run with three, as stock programs compute it, compared with the daemon.

make exact BACKBONE=build/smollm2 VLLM=/path/to/vllm LLAMA=/path/to/python

1. A daemon learns three tasks in float32, and all its regimes are exported.
2. Logits: transformers and PEFT, in an environment without streamlearn, under each export and without one.
   - float32: every prompt. The daemon computes as in training, and once more with the backbone's own attention.
   - float32, transformers alone: its two attention implementations against each other, the rounding of float32.
   - float64: some prompts. What is left is no rounding of float32.
3. Greedy answers: `/v1/completions`, transformers and PEFT, and, where their programs are given, vLLM and llama.cpp (an
   interpreter with xllamacpp, llama.cpp built for Python), with each prompt's regime and on the bare backbone. A prompt
   that no regime explains is left out: the daemon may answer it with the mean of its adapters, which is no export.

Prompts are those of test records, and of training records that were not learned. Prints the figures and writes them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import orjson

from streamlearn.model_files import BUILTIN
from tests.fleet.exact import answers
from tests.fleet.exact.base_gguf import write_base
from tests.fleet.exact.learned_run import LearnedRun, learned
from tests.fleet.exact.logits import compare
from tests.fleet.exact.stock_environment import make_environment
from tests.fleet.processes import Servers
from tests.fleet.task_records import TASKS, read_records


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="builtin:nano", help="its folder, or builtin:nano")
    parser.add_argument("--records", type=int, default=60, help="records of each task that are learned")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-chars", type=int, default=1200, help="of a prompt")
    parser.add_argument("--few", type=int, default=20, help="prompts compared in float64, and for rounding")
    parser.add_argument("--answers", action="store_true", help="compare answers, not only logits")
    parser.add_argument("--vllm", type=Path, help="the vllm program")
    parser.add_argument("--llama", type=Path, help="an interpreter with xllamacpp")
    parser.add_argument("--json", type=Path, help="file for the figures; those of other backbones in it are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamlearn-exact-") as folder:
        figures = _run(given, Path(folder))
    print(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())
    if given.json is not None:
        before = orjson.loads(given.json.read_bytes()) if given.json.exists() else {}
        merged = {**before, Path(given.backbone).name: figures}
        given.json.write_bytes(orjson.dumps(merged, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    train = {task: read_records(task, "train", max_chars=given.max_chars) for task in TASKS}
    stream = [row for task in TASKS for row in train[task][: given.records]]
    unseen = [[*read_records(task, "test", max_chars=given.max_chars), *train[task][given.records :]] for task in TASKS]
    prompts = [row["prompt"] for rows in zip_longest(*unseen) for row in rows if row is not None][: given.prompts]
    assert len(prompts) == given.prompts, f"expected {given.prompts} prompts, found {len(prompts)}"
    python = make_environment(folder / "stock")
    with learned(folder, given.backbone, stream) as run:
        _say(f"learned {run.regimes}")
        backbone = _folder_of(given.backbone)
        figures = {
            "tasks": TASKS,
            "records": given.records,
            "prompts": given.prompts,
            "regimes": len(run.regimes),
            "logits": _logits(run, python, str(backbone), prompts, given.few, folder),
        }
        if given.answers:
            figures["answers"] = _answers(given, run, python, backbone, prompts, folder)
    return figures


def _logits(
    run: LearnedRun, python: Path, backbone: str, prompts: Sequence[str], few: int, folder: Path
) -> dict[str, Any]:
    some = prompts[:few]

    def figures(texts: Sequence[str], **options: Any) -> dict[str, Any]:
        differences = compare(run, python, backbone, texts, folder=folder, **options)
        _say(f"{options}: {differences}")
        return differences

    return {
        "float32": figures(prompts, dtype="float32", with_backbone=False),
        "float32, attention of the backbone": figures(some, dtype="float32", packed=False),
        "float32, against transformers' eager attention": figures(
            some, dtype="float32", packed=False, attention="eager"
        ),
        "float64": figures(some, dtype="float64"),
    }


def _answers(
    given: argparse.Namespace,
    run: LearnedRun,
    python: Path,
    backbone: Path,
    prompts: Sequence[str],
    folder: Path,
) -> dict[str, Any]:
    asked = [answer for answer in answers.of_daemon(run, prompts) if answer.regime is not None]
    by_regime = [(answer.prompt, answer.regime) for answer in asked]
    bare = answers.of_transformers(python, str(backbone), run, [(prompt, None) for prompt in prompts])
    unadapted = {answer.prompt: answer.text for answer in bare}
    stock = answers.of_transformers(python, str(backbone), run, by_regime)
    figures: dict[str, Any] = {
        "tokens": answers.TOKENS,
        "answered by a regime": len(asked),
        "as the bare backbone": sum(answer.text == unadapted[answer.prompt] for answer in asked),
        "transformers": {"with regimes": answers.share([a.text == b.text for a, b in zip(asked, stock, strict=True)])},
    }
    _say(str(figures))
    if given.vllm is not None:
        servers = Servers(given.vllm, backbone)
        alike = answers.agreement_of_vllm(servers, run, [*asked, *bare], folder / "vllm.log")
        figures["vllm"] = _both(alike, len(asked))
        _say(str(figures["vllm"]))
    if given.llama is not None:
        write_base(backbone, folder / "base.gguf")
        alike = answers.agreement_of_llama(given.llama, folder / "base.gguf", str(backbone), run, [*asked, *bare])
        figures["llama.cpp"] = _both(alike, len(asked))
        _say(str(figures["llama.cpp"]))
    return figures


def _both(alike: Sequence[bool], regimes: int) -> dict[str, Any]:
    """Agreement with the daemon, and with transformers on the bare backbone."""
    return {"with regimes": answers.share(alike[:regimes]), "bare backbone": answers.share(alike[regimes:])}


def _folder_of(backbone: str) -> Path:
    """The backbone's folder, for libraries that know no bundled one."""
    return BUILTIN[backbone] if backbone in BUILTIN else Path(backbone)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
