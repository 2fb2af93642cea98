"""The lab: measurements, experiments and the `subquad` command, built on the library `subquad`."""


class UsageError(ValueError):
    """An error that the user can fix: the command prints one line and exits with 2."""


class RunError(RuntimeError):
    """A run that fails for a reason other than bad usage: the command prints one line and exits with 1."""


class Diverged(RunError):
    """A run whose loss became infinite or NaN."""
