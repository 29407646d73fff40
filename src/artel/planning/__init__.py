"""Before a run: checks, memory, speed, and the choice of a model, from the run file and the machine alone.

`check.py` runs all checks; `plan/` plans memory, time and disk; `fit/` advises; `budget/` chooses a model for
`train.budget`; `new/` writes a run file.
"""

from artel.planning.check import Check, Start, check_run, further_problems, notes_on_length
from artel.planning.first_records import check_records

__all__ = ["Check", "Start", "check_records", "check_run", "further_problems", "notes_on_length"]
