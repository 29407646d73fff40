"""Cleaning: `html` turns pages into text, `rules` clean it, `pii` masks personal data, `quality` drops documents."""
