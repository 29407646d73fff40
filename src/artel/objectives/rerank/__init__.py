"""Cross-encoders: how well a document answers a query, both read together."""
