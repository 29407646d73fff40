"""Tokenizers, the token store, the order of blocks, batches. Knows no model."""
