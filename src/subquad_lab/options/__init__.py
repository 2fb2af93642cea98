"""Command-line parsing and YAML configs: from strings to validated values."""
