"""The machine: files that are whole, memory, and what a call takes."""
