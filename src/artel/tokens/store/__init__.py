"""The token store: samples as token ids on disk, memory-mapped and checksummed."""
