"""Duplicates: `exact` ones (documents, lines, paragraphs), and `near`-duplicates by MinHash over `shingles`."""
