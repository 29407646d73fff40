"""Formats of texts, one per file: `Format` (format.py) says what each declares, `artel.registry` lists them."""
