"""Hostile, damaged and careless inputs by family, and the harness that judges what artel does with each: hostile.py."""
