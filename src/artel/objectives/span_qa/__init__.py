"""Extractive question answering: where in a document the answer stands, or that it is not there."""
