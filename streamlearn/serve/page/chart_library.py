"""uPlot, the page's chart library. The distribution uplot-python (extra `page`) brings its files along.

They are read where they were installed. The distribution's Python code is never imported: it draws charts of its own
from a Python prompt, for which it needs IPython.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DISTRIBUTION = "uplot-python"
FILES = {"uplot.js": "uplot/static/uPlot.iife.js", "uplot.css": "uplot/static/uPlot.min.css"}
"""Name under which the page asks for a file: its path in the distribution."""


def chart_library() -> dict[str, bytes]:
    """The files by name; all empty where the distribution is not installed, and then the page has tables only."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return dict.fromkeys(FILES, b"")
    return {name: Path(str(installed.locate_file(path))).read_bytes() for name, path in FILES.items()}
