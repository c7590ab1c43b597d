"""Every link leads somewhere, every page is linked from the README, and tables render."""

from tests.docs.markdown import ROOT, anchors, documents, links


def test_every_relative_link_leads_somewhere() -> None:
    """The file or folder is in the repository, and the anchor is a heading of it."""
    result = [link for document in documents() for link in links(document)]
    assert result
    assert [str(link) for link in result if not (link.path.exists() and link.path.is_relative_to(ROOT))] == []
    anchored = [link for link in result if link.anchor]
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
