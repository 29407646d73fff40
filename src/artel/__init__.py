"""artel: from raw text to a trained transformer language model."""

__version__ = "0.1.0"
