"""Token labels: names in a text (named entity recognition), or a tag for each word (parts of speech).

`tokens_objective.py` is the objective, `word_windows.py` its samples, `tag_set.py` labels and tags, `entities.py`
predicted entities and their scores.
"""
