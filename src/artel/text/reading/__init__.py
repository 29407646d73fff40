"""Reading files of any size: encodings, lines, compressed files, and which records are taken."""
