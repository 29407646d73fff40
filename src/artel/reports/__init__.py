"""The report of a run: what it has done, for people to read."""
