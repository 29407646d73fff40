"""Text + tokenizer + objective to a token store."""
