"""Sources of text: files, globs, folders, URLs, S3 and the hub, divided into input shards."""
