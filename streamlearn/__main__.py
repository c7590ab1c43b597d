"""Entry point of `python -m streamlearn`, the same as `streamlearn`."""

from streamlearn.commands.cli import main

main()
