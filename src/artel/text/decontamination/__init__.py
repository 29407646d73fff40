"""Decontamination: documents that share n-grams with benchmarks are found, with the rows that they share them with."""
