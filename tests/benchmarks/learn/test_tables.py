"""Tables as text."""

from benchmarks.learn.markdown import about, markdown
from benchmarks.learn.summary import summarise
from benchmarks.learn.tables import (
    ablations_table,
    answers_table,
    cell,
    costs_table,
    differences_table,
    estimate,
    interval,
    tables,
    tasks_table,
)
from tests.benchmarks.learn.runs import a_run

RIGHT = {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1], "c": [1, 1, 1, 1]}
WRONG = {"a": [0] * 4, "b": [0] * 4, "c": [0] * 4}
DIFFERENCE = {"value": 0.25, "low": -0.125, "high": 0.5, "seeds": 2}


def test_a_cell_has_mean_and_spread() -> None:
    """One seed has no spread; a missing figure is a dash."""
    assert cell({"mean": 0.25, "sd": 0.125, "seeds": 2}, 3) == "0.250 ± 0.125"
    assert cell({"mean": 1234.0, "sd": None, "seeds": 1}, 0) == "1,234"
    assert cell(None, 3) == "-"


def test_an_estimate_has_a_sign_and_an_interval() -> None:
    assert estimate(DIFFERENCE) == "+0.250 [-0.125, +0.500]"
    assert interval(DIFFERENCE) == "-0.125 to 0.500"
    assert (estimate(None), interval(None)) == ("-", "-")


def test_the_first_rows_are_blind_and_frozen_and_the_ceiling_is_marked() -> None:
    """Skill stands beside AP, zero-shot scores beside the gain over the untrained backbone."""
    runs = [a_run("blind", end=WRONG), a_run("frozen"), a_run("streamlearn"), a_run("joint", end=RIGHT, shuffled=True)]
    table = answers_table(summarise(runs))
    assert table.headings == ["method", "AP", "AP, 95 %", "skill", "LA", "AF", "BWT", "ZST", "over frozen", "n"]
    assert [row[0] for row in table.rows] == ["blind", "frozen", "streamlearn", "joint (ceiling)"]
    skill = [row[3] for row in table.rows]
    assert skill == ["0.00", "0.50", "0.50", "1.00"]
    assert table.rows[3][4:7] == ["-", "-", "-"]
    assert table.rows[3][8].startswith("+0.875 [")
    assert table.bold == {"streamlearn"}


def test_undefined_skill_is_explained_below_the_table() -> None:
    table = answers_table(summarise([a_run("blind"), a_run("joint")]))
    assert [row[3] for row in table.rows] == ["-", "-"]
    assert any(note.startswith("skill is undefined (-): AP of the ceiling, joint, is 0.500") for note in table.notes)


def test_columns_without_values_are_left_out() -> None:
    """Without unseen tasks there is no zero-shot score; without detection there are no boundaries found."""
    end = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 0]}
    summary = summarise([a_run("lora", end=end, detection=None)])
    assert not {"ZST", "over frozen"} & set(answers_table(summary).headings)
    assert not {"found", "false", "FWT"} & set(costs_table(summary).headings)
    assert [table.title for table in tables(summary)][-1] == "By task"


def test_each_row_of_costs_names_its_commit() -> None:
    """Methods of one table may be of different commits."""
    other = {"commit": "fedcba9876543210", "torch": "2"}
    table = costs_table(summarise([a_run("streamlearn"), a_run("lora", versions=other)]))
    assert table.headings[-1] == "commit"
    assert [row[-1] for row in table.rows] == ["01234567", "fedcba98"]


def test_differences_are_from_streamlearn() -> None:
    """With their interval, and the number of seeds that both have."""
    table = differences_table(summarise([a_run("streamlearn"), a_run("lora", end=WRONG), a_run("ewc", 1)]))
    assert [row[0] for row in table.rows] == ["lora"]
    assert table.rows[0][1].startswith("-0.500 [-")
    assert table.rows[0][-1] == "1"


def test_tasks_show_their_course() -> None:
    """Right after the segment, and at the end with its interval; unseen tasks have an end only."""
    table = tasks_table(summarise([a_run("blind"), a_run("streamlearn")]))
    assert table.headings == ["task", "metric", "records", "blind", "streamlearn"]
    a, _, c = table.rows
    assert a[:3] == ["a", "exact match", "4"]
    assert a[4].startswith("0.75 → 0.25 [0.00, ")
    assert c[0] == "c (unseen)"
    assert c[4].startswith("0.12 [0.00, ")


def test_ablations_show_what_they_remove_is_worth() -> None:
    """An ablation that answers nothing: what it removes earns; an equal one: no measurable effect."""
    runs = [a_run("streamlearn", end=RIGHT), a_run("heads 1", end=WRONG), a_run("heads 2", end=RIGHT)]
    table = ablations_table(summarise(runs))
    assert [(row[0], row[-2]) for row in table.rows] == [("heads 1", "earns"), ("heads 2", "no measurable effect")]
    assert table.rows[0][4] == "-1.000 [-1.000, -1.000]"


def test_the_text_says_what_was_run() -> None:
    """Backbone, split, records and commit; development records are called that."""
    summary = summarise([a_run("streamlearn", split="development")])
    assert about(summary) == (
        "tiny-model with profile tiny: 2 segments, 40 training records; scored on 8 development records of 2 tasks and "
        "4 of tasks never trained on (1). float32 on cpu, torch 2, commit 0123456789ab."
    )
    text = markdown(summary)
    assert text.startswith("# two\n")
    assert "| **streamlearn** | 0.500 |" in text
    assert text.index("## What holds") < text.index("## Answers")
