"""The machine: files, memory, and timing."""
