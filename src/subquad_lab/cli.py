"""The `subquad` command: one function per subcommand.

A function's parameters are its options, its docstring is the help. What a subcommand needs is imported inside
its function, so that `subquad --help` does not wait for torch.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from subquad_lab import UsageError


def demo(
    methods: str = "taylor:2,random:256,linear:elu,separable",
    lengths: str = "1024,4096,16384",
    heads: int = 4,
    width: int = 32,
) -> None:
    """Compare methods of attention on this machine: time, peak memory, error.

    Args:
        methods: What to compare with exact attention, with commas between: taylor:DEGREE,
            random:FEATURES, linear:ACTIVATION, separable.
        lengths: Sequence lengths, with commas between.
        heads: Number of heads.
        width: Width of a head.
    """
    from subquad_lab.demo import run

    run(methods=methods, lengths=lengths, heads=heads, width=width)


COMMANDS = (demo,)


def run(arguments: Sequence[str] | None) -> None:
    """Parse the arguments and call the function of the subcommand."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="subquad",
        version=version("subquad"),
        description="Attention whose cost and error you choose.",
        exit_on_error=False,
    )
    subcommands = parser.add_subcommands()
    for command in COMMANDS:
        title = (command.__doc__ or "").partition("\n")[0]
        options = ArgumentParser(exit_on_error=False)
        options.add_function_arguments(command)
        subcommands.add_subcommand(command.__name__, options, help=title)

    chosen = parser.parse_args(arguments)
    function = {command.__name__: command for command in COMMANDS}[chosen.subcommand]
    function(**chosen[chosen.subcommand].as_dict())


def complain(message: object) -> None:
    """Print one line; the parser's own messages can have several."""
    print("subquad: error:", " ".join(str(message).split()), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for bad usage, 130 for Ctrl-C."""
    from argparse import ArgumentError

    try:
        try:
            run(arguments)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is still caught
    except (ArgumentError, UsageError) as error:
        complain(error)
        return 2
    except ModuleNotFoundError as error:
        complain(f"{error.name} is missing; the command needs: pip install 'subquad[lab]'")
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return 0
