"""check-config --sample: what would be learned of the first records, and what would be refused and why."""

import json
from pathlib import Path
from typing import Any

from streamlearn.cli.sample import MAX_CONTEXT, sample
from streamlearn.settings import Settings

CHANGES: list[dict[str, Any] | None] = [
    {"after": {"question": "Open on Sunday?", "answer": "No."}, "op": "c"},
    {"before": {"question": "Open?"}, "after": None, "op": "d"},
    {"after": {"qestion": "Open?", "answer": "No."}, "op": "c"},
    {"after": {"question": "word " * MAX_CONTEXT, "answer": "Yes."}, "op": "u"},
    {"after": {"question": "never read", "answer": "No."}, "op": "c"},
]


def shown(folder: Path, number: int) -> list[str]:
    (folder / "changes.jsonl").write_text("".join(json.dumps(change) + "\n" for change in CHANGES), encoding="utf-8")
    settings = Settings(
        state=folder / "state",
        source={"jsonl": {"path": folder / "changes.jsonl"}},
        records={"unwrap": "after", "prompt": r"{question}\nAnswer:", "completion": "answer"},
    )
    return [text.plain.removesuffix("\n") for text in sample(settings, number)]


def test_each_record_is_shown_with_the_learned_part_marked(tmp_path: Path) -> None:
    """Then a refusal with its reason, a deletion, the counts; nothing is written."""
    head, text, deleted, refused, _, long, counts = shown(tmp_path, 4)
    assert head.startswith("changes.jsonl-0 offset 0: ")
    assert text == "Open on Sunday?\nAnswer:⟦No.<|endoftext|>⟧"
    assert deleted.endswith("offset 1: ignored: the row was deleted (change data capture)")
    assert "offset 2: dead letter (bad_form): records.prompt: question must exist" in refused
    assert long.startswith("word word")
    assert long.endswith("Answer:⟦Yes.<|endoftext|>⟧")
    assert len(long) < MAX_CONTEXT + 100
    assert counts == "of 4 records: 2 learned, 1 deletion, dead letters: 1 bad_form"
    assert not (tmp_path / "state").exists()
