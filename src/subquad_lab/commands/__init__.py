"""The subcommands of `subquad`, one file each, under its own name."""
