"""What several test files need: fixtures, small models, runs, servers, and the programs that tests start."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
"""Programs that tests start in processes of their own."""
