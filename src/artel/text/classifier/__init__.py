"""A quality classifier of texts: trained on good and bad ones, and applied to each document."""
