"""Learning from rewards (GRPO and similar methods): a policy writes answers and learns from their rewards.

`config.py` has the settings and presets, `losses.py` the advantages and the loss.
"""
