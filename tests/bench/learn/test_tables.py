"""Tables as text."""

from streamlearn.bench.learn.summary import summarise
from streamlearn.bench.learn.tables import about, cell, table_of_ablations, table_of_methods
from tests.bench.learn.runs import a_run


def test_a_cell_has_mean_and_spread() -> None:
    """One seed has no spread; a missing figure is a dash."""
    assert cell({"mean": 0.25, "sd": 0.125, "seeds": 2}, 3) == "0.250 ± 0.125"
    assert cell({"mean": 0.25, "sd": None, "seeds": 1}, 2, sign=True) == "+0.25"
    assert cell(None, 3) == "-"


def test_columns_without_values_are_left_out() -> None:
    """Methods without given boundaries are bold; without ablations there is no second table."""
    summary = summarise([a_run("streamlearn", 0), a_run("lora", 0, detection=None)])
    table = table_of_methods(summary)
    assert table.headings[:3] == ["", "AP", "AF"]
    assert not {"ZST", "FWT"} & set(table.headings)
    assert table.bold == {"streamlearn"}
    assert [row[0] for row in table.rows] == ["streamlearn", "lora"]
    assert table_of_ablations(summary) is None
    assert about(summary).startswith("2 segments, 40 records, 4 test records; float32, torch 2, commit 0123456789ab.")
