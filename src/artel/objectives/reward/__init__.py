"""A score for an answer: learned from which of two answers people prefer, or from answers that are good or bad."""
