"""Extractive question answering: the span of a document that answers a question, or no answer.

`span_qa_objective.py` is the objective, `question_windows.py` its samples, `heads.py` logits and losses, `answers.py`
predictions, metrics and the official prediction files.
"""
