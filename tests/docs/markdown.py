"""The repository's Markdown documents: their links, their anchors and their marked command blocks."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
KINDS = ("run", "run: daemon", "run: broker")

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
_LINK = re.compile(r"\]\(\s*<?([^()<>\s]+)>?(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)")
_HTML_LINK = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
_HTML_ANCHOR = re.compile(r"<a\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")
_ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:|^//", re.IGNORECASE)
_MARK = re.compile(r"^<!-- (run(?:: [a-z]+)?) -->$")


@dataclass(frozen=True)
class Link:
    """A relative link of a document."""

    document: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}: {self.target}"

    @property
    def path(self) -> Path:
        """The file or folder that it names; the document itself for a bare anchor."""
        name = unquote(self.target.partition("#")[0])
        return (self.document.parent / name).resolve() if name else self.document

    @property
    def anchor(self) -> str:
        """What follows the `#`, empty without one."""
        return unquote(self.target.partition("#")[2])


@dataclass(frozen=True)
class Block:
    """A shell block that is marked as runnable."""

    document: Path
    line: int
    """Of the mark."""
    kind: str
    """One of `KINDS`; anything else is a mistake that a test reports."""
    language: str
    script: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Every document of the front door and of docs/."""
    return [*(ROOT / name for name in FRONT if (ROOT / name).exists()), *sorted((ROOT / "docs").rglob("*.md"))]


def links(document: Path) -> list[Link]:
    """The relative links and images of a document, code blocks and inline code left out."""
    found = []
    for numbers, paragraph in paragraphs(document):
        text = re.sub(r"(`+)(.+?)\1", lambda code: "`" * len(code[0]), paragraph, flags=re.DOTALL)
        for pattern in (_LINK, _HTML_LINK):
            for match in pattern.finditer(text):
                if not _ELSEWHERE.match(match[1]):
                    line = numbers[text.count("\n", 0, match.start(1))]
                    found.append(Link(document, line, match[1]))
    return found


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings, and those written as HTML."""
    made: Counter[str] = Counter()
    found = set()
    for _, paragraph in paragraphs(document):
        found.update(_HTML_ANCHOR.findall(paragraph))
        for line in paragraph.splitlines():
            if heading := _HEADING.match(line):
                slug = _slug(heading[1])
                found.add(f"{slug}-{made[slug]}" if made[slug] else slug)
                made[slug] += 1
    return found


def blocks(document: Path) -> list[Block]:
    """The marked blocks of a document, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines):
        mark = _MARK.match(line)
        if mark is None:
            continue
        fence = _FENCE.match(lines[number + 1]) if number + 1 < len(lines) else None
        assert fence, f"{document}:{number + 1}: expected a code fence on the line after <!-- {mark[1]} -->"
        end = next(at for at in range(number + 2, len(lines)) if lines[at].strip() == fence[1])
        language = lines[number + 1].strip().removeprefix(fence[1]).strip()
        script = "\n".join(lines[number + 2 : end]) + "\n"
        found.append(Block(document, number + 1, mark[1], language, script))
    return found


def _slug(heading: str) -> str:
    """GitHub's anchor: lower case, without markup and punctuation, spaces as hyphens."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", "").lower())
    return text.strip().replace(" ", "-")


def paragraphs(document: Path) -> Iterator[tuple[Sequence[int], str]]:
    """Text between blank lines and outside of fenced and HTML-commented blocks, with the numbers of its lines."""
    fence = ""
    numbers: list[int] = []
    held: list[str] = []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        mark = _FENCE.match(line)
        if fence or mark or not line.strip():
            if held:
                yield numbers, "\n".join(held)
                numbers, held = [], []
            if mark:
                fence = "" if fence and line.strip() == fence else fence or mark[1]
            continue
        numbers.append(number)
        held.append(line)
    if held:
        yield numbers, "\n".join(held)
