"""Texts in which names are marked, or each word has a tag: columns of CoNLL, and rows of JSON."""
