"""Sources, cleaning, duplicates, split: raw text to documents, each accounted for. Knows no tokens."""
