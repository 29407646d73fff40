"""From a configuration or a folder to a model with weights, and back to a folder.

`build.py` is the entry: `build_model` for training, `load_model` for use. `check.py` checks before any text is read.
"""
