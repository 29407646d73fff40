"""Tokenizers: loading, training, fast encoding, chat templates."""
