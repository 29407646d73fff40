"""Configurations of other tools as run files, one module per tool."""
