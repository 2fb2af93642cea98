"""The lab: measurements, experiments and the `subquad` command, built on the library `subquad`."""

MAX_MESSAGE_CHARACTERS = 2000


def one_line(message: object) -> str:
    """Return a message as one line of printable characters, because it may quote a file or a name.

    Example:
        >>> one_line("no such file:\\n  a\\x1b[2Jb")
        'no such file: a\\\\x1b[2Jb'
    """
    text = " ".join(str(message).split())
    if len(text) > MAX_MESSAGE_CHARACTERS:
        text = f"{text[: MAX_MESSAGE_CHARACTERS - 4]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


class UsageError(ValueError):
    """An error that the user can fix: the command prints one line and exits with 2."""


class RunError(RuntimeError):
    """A run that fails for a reason other than bad usage: the command prints one line and exits with 1."""


class Diverged(RunError):
    """A run whose loss became infinite or NaN."""
