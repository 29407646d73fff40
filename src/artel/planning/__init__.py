"""Before a run: check it, plan its memory and speed, and choose a model. Needs the run file and the machine only.

`check.py` runs all checks; `plan/` plans memory, time and disk; `fit/` advises; `budget/` chooses a model for
`train.budget`; `new/` writes a run file.
"""

from artel.planning.check import Check, StartConditions, check_run, find_further_problems, find_length_notes
from artel.planning.first_records import check_records

__all__ = ["Check", "StartConditions", "check_records", "check_run", "find_further_problems", "find_length_notes"]
