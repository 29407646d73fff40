"""How fast this machine runs the operations of a training step, for `artel plan`."""
