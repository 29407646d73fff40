"""Memory and time before the run."""
