"""Vectors of texts (bi-encoders): near one another where the texts match."""
