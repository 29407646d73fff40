"""Build, load and save models.

`build.py` is the entry: `build_model` for training, `load_model` for use. `check.py` checks before any text is read.
"""
