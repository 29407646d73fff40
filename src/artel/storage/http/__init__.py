"""Downloads by http(s), resumed after interruptions, with time limits."""
