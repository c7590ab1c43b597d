"""`python -m streamlearn` is `streamlearn`."""

from streamlearn.commands.cli import main

main()
