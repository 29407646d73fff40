"""What a target is when there is none; apart from the losses, so that preparing text needs no PyTorch."""

IGNORED = -100  # the target of a position that no loss is taken on; transformers' and PyTorch's own value
