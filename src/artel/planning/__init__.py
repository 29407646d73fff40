"""Before a run: everything that can be said of it without training, from its run file and the machine."""

from artel.planning.check import Check, Start, check_run, further_problems, notes_on_length
from artel.planning.first_records import check_records

__all__ = ["Check", "Start", "check_records", "check_run", "further_problems", "notes_on_length"]
