"""Checkpoints: their format, writing while training goes on, retention, copies on S3."""
