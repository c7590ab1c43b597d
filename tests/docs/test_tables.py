"""Tables render: GitHub drops the cells of a row that has more than its header, and ends a table at a line without."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, documents, paragraphs

_RULE = re.compile(r"^\|(?: *:?-+:? *\|)+$")


def cells(row: str) -> int:
    """Of a row between pipes; an escaped one is part of its cell."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_row_has_as_many_cells_as_its_header(document: Path) -> None:
    """And every table has the line that makes it one."""
    broken = []
    for numbers, paragraph in paragraphs(document):
        lines = list(zip(numbers, paragraph.splitlines(), strict=True))
        for is_table, rows in groupby(lines, key=lambda line: line[1].startswith("|")):
            if not is_table:
                continue
            header, *others = rows
            wanted = cells(header[1])
            if not others or not _RULE.match(others[0][1]):
                broken.append(f"line {header[0]}: no |---| under the header")
            broken += [f"line {at}: {cells(row)} cells, not {wanted}" for at, row in others if cells(row) != wanted]
    assert broken == []
