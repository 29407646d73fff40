"""The sections of a run file, one module per theme."""
