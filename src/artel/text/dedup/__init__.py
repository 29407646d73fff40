"""Duplicates: exact ones, repeated lines and paragraphs, near-duplicates by MinHash."""
