"""`python -m benchmarks.mot`."""

from benchmarks.measuring import command
from benchmarks.mot.benchmark import main

command(main)
