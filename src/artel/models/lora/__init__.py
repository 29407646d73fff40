"""Low-rank adapters.

`adapters.py` adds them to a model, `adapter_folder.py` saves, loads and merges them, `layers.py` computes them (imports
peft).
"""
