"""`artel serve`: a model behind OpenAI's API."""
