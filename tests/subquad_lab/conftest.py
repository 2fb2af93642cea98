"""What the tests of all commands need."""

from collections.abc import Callable

import pytest

from subquad_lab.cli import main


@pytest.fixture
def complaint(capfd: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Run a command that is expected to be refused, and return the one line that says why."""

    def refused(arguments: list[str]) -> str:
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("subquad: error: ")
        assert err.count("\n") == 1
        return err

    return refused
