"""Verdicts as text."""

from benchmarks.learn.summary import summarise
from benchmarks.learn.what_holds import cases_table, sentences
from tests.benchmarks.learn.runs import a_run, drawn


def test_sentences_name_the_methods_by_verdict() -> None:
    """With the number of cases, and of the comparisons."""
    runs = [drawn("streamlearn", 0, 0.7, 0.0), drawn("lora", 0, 0.7, 0.4), drawn("heads 1", 0, 0.3, 0.0)]
    summary = summarise(runs)
    lines = sentences(summary)
    assert lines[0].startswith(
        "streamlearn forgets less than each baseline: holds against lora (1 of 1). No comparison"
    )
    assert lines[1].startswith("AP of streamlearn is at most 0.02 below each ceiling's: not measured.")
    assert 'earns: "heads 1"' in lines[-2]
    assert lines[-1].startswith("These verdicts rest on 4 intervals of 95 %; if no method differed")
    table = cases_table(summary)
    assert table is not None
    assert [row[1] for row in table.rows] == ["lora", "lora"]
    assert table.rows[0][3:] == ["holds", "1"]


def test_nothing_is_claimed_without_comparisons() -> None:
    summary = summarise([a_run("lora")])
    assert cases_table(summary) is None
    assert all("holds" not in line for line in sentences(summary))
