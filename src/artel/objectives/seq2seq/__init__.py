"""Texts written for texts: corrections, summaries, paraphrases, translations."""
