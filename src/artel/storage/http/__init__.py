"""Downloads by http(s): resumed where they were cut, with limits of time."""
