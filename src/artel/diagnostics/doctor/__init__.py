"""What this machine has, what artel would choose on it and why, and what may fail."""

from artel.diagnostics.doctor.examine import Examination, examine

__all__ = ["Examination", "examine"]
