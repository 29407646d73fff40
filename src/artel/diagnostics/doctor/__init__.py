"""What this machine has, what artel would choose on it and why, and what stands in its way."""

from artel.diagnostics.doctor.examine import Examination, examine

__all__ = ["Examination", "examine"]
