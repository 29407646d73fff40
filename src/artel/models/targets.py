"""The target of positions without one. In a file of its own: preparing text does not import PyTorch."""

IGNORED = -100  # no loss is computed there; the value of transformers and PyTorch
