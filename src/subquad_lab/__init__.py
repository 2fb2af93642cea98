"""The lab: measurements, experiments and the `subquad` command, built on the library `subquad`."""


class UsageError(ValueError):
    """Something the user can put right: the command prints it in one line and exits with 2."""


class RunError(RuntimeError):
    """A run that cannot go on, through nobody's wrong word: the command prints it in one line and exits with 1."""


class Diverged(RunError):
    """A run whose loss is no longer a number."""
