"""Made-up run results."""

from pathlib import Path
from typing import Any

import orjson


def a_run(method: str, seed: int, *, ap: float = 0.5, first: float = 0.5, **changes: Any) -> dict[str, Any]:
    """A run of two segments, with changes."""
    known = {"accuracy": first, "loss": 1.0}
    return {
        "suite": "two",
        "method": method,
        "arm": method,
        "seed": seed,
        "AP": ap,
        "AF": 0.1,
        "BWT": -0.1,
        "ZST": None,
        "FWT": None,
        "loss": 2.0,
        "generated": {"a": {"exact_match": 0.5}, "b": {"rouge_l": 0.25}},
        "experts": {"n_eff": 4.0, "layer": "up", "share": {"0": [[1.0, 0.0]], "1": [[0.5, 0.5]]}},
        "detection": {"found": 1, "false": 0, "mean_delay_records": 5.0, "shifts": []},
        "prequential": {"bin_records": 20, "losses": [3.0, 2.0], "mean": 2.5},
        "tokens_per_s": 100.0,
        "peak_memory_mib": 1000.0,
        "matrix": [{"a": known, "b": known}, {"a": known, "b": known}],
        "stretches": [{"tasks": ["a"], "records": 20}, {"tasks": ["b"], "records": 20}],
        "unseen": [],
        "tests": {"a": 2, "b": 2},
        "activated_parameters": 10,
        "versions": {"commit": "0123456789abcdef", "torch": "2"},
        "dtype": "float32",
        **changes,
    }


def write(folder: Path, *runs: dict[str, Any]) -> Path:
    """Write the runs where `bench learn` would."""
    for run in runs:
        file = folder / run["suite"] / f"{run['method']}.{run['seed']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(run))
    return folder
