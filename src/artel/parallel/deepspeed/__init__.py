"""DeepSpeed as the engine of a run.

`config.py` checks a user's DeepSpeed file against the run file (keys in `config_keys.py`, sections in
`config_blocks.py`). `engine.py` is the strategy, `state.py` its weights and optimizer state by name, `checkpoint.py`
reads checkpoints written by DeepSpeed.
"""
