"""What this machine has, what artel would choose on it and why, and what stands in its way."""

from artel.using.doctor.examine import Examination, examine

__all__ = ["Examination", "examine"]
