"""Diagnostics: `doctor.py` (artel doctor), `parallel_check.py` (its --parallel), `hardware.py` (artel hardware)."""
