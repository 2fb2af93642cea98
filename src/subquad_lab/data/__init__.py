"""Data sets: an embedded one for every experiment, and loaders of the usual files."""
