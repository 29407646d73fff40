"""A trained model in the formats of others: Hugging Face folders, adapters, GGUF."""
