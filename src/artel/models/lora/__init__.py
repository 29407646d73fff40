"""Low-rank adapters: put into a model, computed with its layers, saved, merged."""
