"""Entry point of `python -m streamlearn`, the same as `streamlearn`."""

from streamlearn.cli.main import main

main()
