"""Faults during a run: bad steps, memory that runs out, processes that hang (watchdog) or die (rank status)."""
