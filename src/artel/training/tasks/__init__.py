"""Tasks of lm-evaluation-harness, while a model is trained and afterwards."""
