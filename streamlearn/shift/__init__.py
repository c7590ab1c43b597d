"""Shifts, without task ids: which regime each record belongs to, and when its inputs or its answers change.

`Monitor` sees the inputs ahead of training; `AnswersWatch` sees the losses after it.
"""

from streamlearn.shift.answers import AnswersWatch
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.outlook import Sighted
from streamlearn.shift.regimes import RegimeView
from streamlearn.shift.shift import Shift

__all__ = ["AnswersWatch", "Monitor", "RegimeView", "Shift", "Sighted"]
