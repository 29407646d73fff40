"""Calls of tools in texts, as models write them and data sets have them: read back into names and arguments."""
