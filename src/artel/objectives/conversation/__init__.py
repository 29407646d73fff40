"""Conversations as a chat template writes them: which characters are learned, and what is checked of them."""
