"""`python -m streamlearn` is `streamlearn`."""

from streamlearn.cli import main

main()
