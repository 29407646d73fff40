"""Optimizers, parameter groups, loss scaling."""
