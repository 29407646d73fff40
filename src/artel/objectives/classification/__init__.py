"""Classification of texts and text pairs: one label, several labels, or a number.

`classification_objective.py` is the objective, `kinds.py` what differs between one label, several and a number
(targets, losses), `label_metrics.py` the metrics, `framing.py` the special tokens around a text or a pair.
"""
