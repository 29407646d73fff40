"""What models that give a score share: rows of ids and their scores, and how far probabilities can be trusted."""
