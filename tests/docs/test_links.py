"""Every link leads somewhere, and every document can be found from the index."""

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, anchors, documents, links

MAX_README_LINES = 200


def names(path: Path) -> str:
    """For a test's id."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", documents(), ids=names)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    """The file or folder is in the repository, and the anchor is a heading of it."""
    broken = [str(link) for link in links(document) if not link.path.exists() or not link.path.is_relative_to(ROOT)]
    assert broken == []
    lost = [
        str(link)
        for link in links(document)
        if link.anchor and (link.path.suffix != ".md" or link.anchor not in anchors(link.path))
    ]
    assert lost == []


def test_every_document_is_reachable_from_the_index() -> None:
    """By following links from docs/index.md."""
    index = ROOT / "docs" / "index.md"
    reached, ahead = {index}, [index]
    while ahead:
        for link in links(ahead.pop()):
            if link.path.suffix == ".md" and link.path not in reached and link.path.exists():
                reached.add(link.path)
                ahead.append(link.path)
    wanted = set((ROOT / "docs").rglob("*.md"))
    assert sorted(map(names, wanted - reached)) == []


def test_the_readme_leads_to_every_document_of_the_first_level() -> None:
    """A newcomer starts there."""
    reached = {link.path for link in links(ROOT / "README.md")}
    wanted = set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"}
    assert sorted(map(names, wanted - reached)) == []


def test_the_readme_is_short() -> None:
    """What is longer belongs in docs/."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES


def test_links_and_anchors_are_found(tmp_path: Path) -> None:
    """In text, tables, images and over a line's end; not in code, and not where they lead out of the repository."""
    document = tmp_path / "a.md"
    document.write_text(
        "# A `b`: c, d\n\n## A `b`: c, d\n\n[x](b.md#y) [![i](i.png)](c.md) ![alt\ntext](p.png)\n"
        "| [t](d.md) |\n\n`[no](n.md)` [out](https://x.org/) \n\n```\n[no](n.md)\n# no\n```\n[e\nnd](e.md 'no')\n"
        '<a id="here"></a><img src="h.png">\n'
    )
    found = [(link.line, link.target) for link in links(document)]
    text = [(5, "b.md#y"), (5, "c.md"), (5, "i.png"), (6, "p.png"), (7, "d.md"), (16, "e.md"), (17, "h.png")]
    assert sorted(found) == text
    assert anchors(document) == {"a-b-c-d", "a-b-c-d-1", "here"}
