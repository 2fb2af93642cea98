"""The `subquad` command: one function per subcommand.

A function's parameters are its options, its docstring is the help. What a subcommand needs is imported inside
its function, so that `subquad --help` does not wait for torch.
"""

import inspect
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

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


def plan(
    length: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    max_error: float = 0.05,
    logit_range: float | None = None,
    sample: str | None = None,
    key_length: int | None = None,
    value_dim: int | None = None,
    key_heads: int | None = None,
    batch: int | None = None,
    causal: bool = True,
    training: bool = False,
    dtype: str = "float32",
    all: bool = False,
) -> None:
    """Choose the quickest method for a shape and an error, and say why.

    Times are predicted for this machine, which is measured the first time: half a minute, kept in the cache folder.

    Args:
        length: Number of queries; needed without a sample, as is head-dim. Sizes that are not given are the sample's.
        heads: Number of query heads; 1 without a sample.
        head_dim: Width of a head.
        max_error: Relative error, |out - exact| / |exact|, that is allowed.
        logit_range: How far the scaled logits reach to either side of 0: errors are predicted from it.
        sample: A safetensors file with query, key and value (or q, k, v), each (..., heads, length, width):
            errors are measured on it.
        key_length: Number of keys, if it is not that of the queries.
        value_dim: Width of the values, if it is not head-dim.
        key_heads: Number of key heads, if query heads share them.
        batch: Number of sequences; 1 without a sample.
        causal: Whether a query sees only the keys up to its own place.
        training: Whether the backward counts too.
        dtype: float32, float64, bfloat16 or float16.
        all: Show every candidate, not just those that compete.
    """
    from subquad_lab.planning import run

    sizes = dict(query_length=length, key_length=key_length, head_dim=head_dim, value_dim=value_dim, heads=heads,
                 key_heads=key_heads, batch=batch)  # fmt: skip
    run(sizes, max_error, logit_range, sample, causal, training, dtype, all)


def bench(
    methods: str = "taylor:2,random:256,linear:elu,separable",
    lengths: str = "1024,4096,16384",
    heads: int = 8,
    head_dim: int = 64,
    causal: bool = True,
    backward: bool = False,
    out: str | None = None,
) -> None:
    """Time methods against torch's own attention, and against the peak of matrix products.

    Args:
        methods: What to time, with commas between: taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable,
            exact.
        lengths: Sequence lengths, with commas between.
        heads: Number of heads.
        head_dim: Width of a head.
        causal: Whether a query sees only the keys up to its own place.
        backward: Whether gradients are computed too.
        out: Folder for bench.json and bench.svg; made if it is missing.
    """
    from subquad_lab.bench import run

    run(methods, lengths, heads, head_dim, causal, backward, out)


COMMANDS = (demo, plan, bench)


def run(arguments: Sequence[str] | None) -> None:
    """Parse the arguments and call the function of the subcommand."""
    from jsonargparse import ArgumentParser

    class Options(ArgumentParser):
        """Names with dashes; and what is true or false can be named alone: --all."""

        def add_argument(self, *names: str, **settings: Any) -> Any:
            if settings.get("type") is bool:
                settings |= dict(nargs="?", const=True)
            return super().add_argument(*(name.replace("_", "-") for name in names), **settings)

    parser = ArgumentParser(
        prog="subquad",
        version=version("subquad"),
        description="Attention whose cost and error you choose.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    subcommands = parser.add_subcommands()
    for command in COMMANDS:
        description = (inspect.getdoc(command) or "").partition("\nArgs:")[0]
        options = Options(description=description, exit_on_error=False, allow_abbrev=False)
        options.add_function_arguments(command, as_group=False)
        subcommands.add_subcommand(command.__name__, options, help=description.partition("\n")[0])

    chosen = parser.parse_args(arguments)
    function = {command.__name__: command for command in COMMANDS}[chosen.subcommand]
    function(**chosen[chosen.subcommand].as_dict())


KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def wrong_value(error: Exception) -> str:
    """The parser speaks of keys, classes and unions; say which option was wrong, and what it takes."""
    pattern = r"Parser key \"(\w+)\":.*?Expected a <class '(int|float|bool)'>.*value: (.*)"
    if found := re.match(pattern, str(error), re.DOTALL):
        name, kind, value = found.groups()
        return f"--{name.replace('_', '-')}: expected {KINDS[kind]}, found {value!r}"
    return str(error)


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
    except ArgumentError as error:
        complain(wrong_value(error))
        return 2
    except UsageError as error:
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
        print("subquad: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # such as a full disk behind the standard output
        complain(f"{error.filename or 'output'}: {error.strerror}")
        return 1
    return 0
