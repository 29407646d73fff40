"""Reading and writing anywhere: downloads, whole-or-absent writes, checksums, locks."""
