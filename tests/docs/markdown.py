"""The repository's Markdown documents: their links, their anchors and their marked command blocks."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
_LINK = re.compile(r"\]\(\s*([^()<>\s]+)(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*$")
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
        name = self.target.partition("#")[0]
        return (self.document.parent / name).resolve() if name else self.document

    @property
    def anchor(self) -> str:
        return self.target.partition("#")[2]


@dataclass(frozen=True)
class Block:
    """A shell block that is marked as runnable."""

    document: Path
    line: int
    """Of the mark."""
    kind: str
    language: str
    script: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """The documents of the root, and every one below docs/."""
    return [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]


def links(document: Path) -> list[Link]:
    """The relative links and images of a document; code is left out."""
    result = []
    for numbers, paragraph in paragraphs(document):
        text = re.sub(r"(`+)(.+?)\1", lambda code: "`" * len(code[0]), paragraph, flags=re.DOTALL)
        relative = [match for match in _LINK.finditer(text) if not _ELSEWHERE.match(match[1])]
        result += [Link(document, numbers[text.count("\n", 0, match.start(1))], match[1]) for match in relative]
    return result


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    count: Counter[str] = Counter()
    result = set()
    for _, paragraph in paragraphs(document):
        for line in paragraph.splitlines():
            if heading := _HEADING.match(line):
                slug = re.sub(r"[^\w\- ]", "", heading[1].lower()).strip().replace(" ", "-")
                result.add(f"{slug}-{count[slug]}" if count[slug] else slug)
                count[slug] += 1
    return result


def blocks(document: Path) -> list[Block]:
    """The marked blocks of a document, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    result = []
    for number, line in enumerate(lines):
        if mark := _MARK.match(line):
            fence = _FENCE.match(lines[number + 1])
            assert fence, f"{document}:{number + 1}: expected a code fence on the line after <!-- {mark[1]} -->"
            end = next(at for at in range(number + 2, len(lines)) if lines[at].strip() == fence[1])
            language = lines[number + 1].strip().removeprefix(fence[1]).strip()
            result.append(Block(document, number + 1, mark[1], language, "\n".join(lines[number + 2 : end]) + "\n"))
    return result


def paragraphs(document: Path) -> Iterator[tuple[Sequence[int], str]]:
    """Text between blank lines and outside of fenced blocks, with the numbers of its lines."""
    fence = ""
    numbers: list[int] = []
    text: list[str] = []
    for number, line in enumerate([*document.read_text(encoding="utf-8").splitlines(), ""], start=1):
        mark = _FENCE.match(line)
        if fence or mark or not line.strip():
            if text:
                yield numbers, "\n".join(text)
                numbers, text = [], []
            if mark:
                fence = "" if fence and line.strip() == fence else fence or mark[1]
            continue
        numbers.append(number)
        text.append(line)
