"""Data sets: an embedded one for each experiment, and loaders for standard file formats."""
