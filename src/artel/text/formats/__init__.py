"""Formats of texts, one per file. `Format` (format.py) declares a format; `artel.registry` lists all formats."""
