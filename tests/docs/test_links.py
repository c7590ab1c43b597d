"""Every link leads somewhere, every page is linked from the README, and tables render."""

import re
from itertools import groupby
from pathlib import Path

from tests.docs.markdown import ROOT, anchors, documents, links, paragraphs

MAX_README_LINES = 120
_RULE = re.compile(r"^\|(?: *:?-+:? *\|)+$")


def test_every_relative_link_leads_somewhere() -> None:
    """The file or folder is in the repository, and the anchor is a heading of it."""
    found = [link for document in documents() for link in links(document)]
    assert found
    assert [str(link) for link in found if not (link.path.exists() and link.path.is_relative_to(ROOT))] == []
    anchored = [link for link in found if link.anchor]
    assert [str(link) for link in anchored if link.path.suffix != ".md" or link.anchor not in anchors(link.path)] == []


def test_every_document_is_reachable_from_the_readme() -> None:
    """The pages of docs/ directly, the evidence by following links."""
    readme = ROOT / "README.md"
    direct = {link.path for link in links(readme)}
    assert set((ROOT / "docs").glob("*.md")) - direct == set()
    reached, ahead = {readme}, [readme]
    while ahead:
        for link in links(ahead.pop()):
            if link.path.suffix == ".md" and link.path not in reached and link.path.exists():
                reached.add(link.path)
                ahead.append(link.path)
    assert set((ROOT / "docs").rglob("*.md")) - reached == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_links_and_anchors_are_found(tmp_path: Path) -> None:
    """In text, tables, images and over a line's end; not in code, and not where they lead out of the repository."""
    document = tmp_path / "a.md"
    document.write_text(
        "# A `b`: c, d\n\n## A `b`: c, d\n\n[x](b.md#y) [![i](i.png)](c.md) ![alt\ntext](p.png)\n"
        "| [t](d.md) |\n\n`[no](n.md)` [out](https://x.org/) \n\n```\n[no](n.md)\n# no\n```\n[e\nnd](e.md 'no')\n"
    )
    found = [(link.line, link.target) for link in links(document)]
    text = [(5, "b.md#y"), (5, "c.md"), (5, "i.png"), (6, "p.png"), (7, "d.md"), (16, "e.md")]
    assert sorted(found) == text
    assert anchors(document) == {"a-b-c-d", "a-b-c-d-1"}


def test_every_row_of_a_table_has_as_many_cells_as_its_header() -> None:
    """GitHub drops the cells of a row that has more, and needs the line under the header."""
    broken = []
    for document in documents():
        for numbers, paragraph in paragraphs(document):
            lines = list(zip(numbers, paragraph.splitlines(), strict=True))
            for is_table, rows in groupby(lines, key=lambda line: line[1].startswith("|")):
                if not is_table:
                    continue
                header, *others = rows
                where = f"{document.relative_to(ROOT)}:{header[0]}"
                if not others or not _RULE.match(others[0][1]):
                    broken.append(f"{where}: no |---| under the header")
                broken += [f"{where}: row {at}" for at, row in others if _cells(row) != _cells(header[1])]
    assert broken == []


def _cells(row: str) -> int:
    """Of a row between pipes; an escaped one is part of its cell."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1
