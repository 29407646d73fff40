"""Where metrics go: the terminal, files, trackers, the profiler."""
