"""The `subquad` command in this process, with what it printed."""

import io
import re
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from stress.parts import Failure
from subquad_lab.cli import main


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def is_refusal(self) -> bool:
        """Whether it ended with exit code 2 and one line that says why; progress and warnings may precede it."""
        lines = self.err.splitlines() or [""]
        count = sum(line.startswith("subquad: error: ") for line in lines)
        return self.code == 2 and count == 1 and lines[-1].startswith("subquad: error: ")

    @property
    def is_noticed(self) -> bool:
        """Whether the user is told about a damage."""
        return self.is_refusal or bool(re.search(r"^subquad: warning: |damaged|\bfailed\b", self.err + self.out, re.M))


def run_command(*arguments: object) -> Outcome:
    """Run a command; raise Failure where a user would see a traceback."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    except SystemExit as error:  # of the parser, as for --help
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "subquad" in f.filename), frames[-1])
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        shown = " ".join(map(str, arguments))
        raise Failure("traceback", f"{type(error).__name__}: {str(error)[:150]} ({where}): subquad {shown}") from error
    return Outcome(code, out.getvalue(), err.getvalue())
