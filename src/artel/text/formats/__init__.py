"""One module per format: from the bytes of a file to records."""
