"""Checks and measurements of this machine: `artel doctor` and `artel hardware`."""
