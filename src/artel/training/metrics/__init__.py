"""Metrics of a run and the trackers that receive them.

`tracker.py` is the interface; `trackers.py` has all trackers of a run, and artel's own. Each other file is the tracker
of one package. `jsonl.py` appends lines to a file, and buffers them while the disk is full.
"""
