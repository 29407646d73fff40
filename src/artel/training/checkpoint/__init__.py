"""Checkpoints of a run.

`format.py` defines and reads them, `async_saver.py` writes them in a thread, `sharded_files.py` holds tensors that are
sharded over processes, `retention.py` removes old ones, `s3_mirror.py` copies them, `items.py` lists their items.
"""
