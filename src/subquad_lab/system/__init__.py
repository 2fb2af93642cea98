"""The machine: atomic files, memory, and timing."""
