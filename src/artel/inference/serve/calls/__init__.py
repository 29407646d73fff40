"""Calls of tools in answers: read as the model writes them, or forced by a grammar."""
