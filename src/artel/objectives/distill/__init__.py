"""Distillation: a student learns the distributions of a teacher."""
