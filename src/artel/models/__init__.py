"""Building, loading and saving Hugging Face models."""
