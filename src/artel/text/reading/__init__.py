"""Reading files of any size: encodings, lines, compressed files, and the rows and sets that a source selects."""
