"""The hot loops in C: compiled on the user's machine, one file per family of operations."""
