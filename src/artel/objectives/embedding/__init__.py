"""Text embeddings (bi-encoders): vectors that are near one another if the texts match.

`embedding_objective.py` is the objective, `matches.py` its samples, `vectors.py` pooling and encoding, `losses.py` the
losses, `retrieval.py` the metrics, `sentence_transformers.py` the files of a sentence-transformers folder.
"""
