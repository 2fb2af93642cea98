"""From the words of the command line to the call of a function: its parameters are options, its docstring is the help.

Commands of experiments have a second level, `subquad train language`, whose options are the fields of the experiment's
config; what --preset and --config say become their defaults.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from typing import Any, NamedTuple

from docstring_parser import parse
from jsonargparse import ArgumentParser

from subquad_lab import UsageError
from subquad_lab.options.fields import Configured, given_fields, presets, split_off, without_varied

Command = Callable[..., None]
Experiments = Mapping[str, Configured[Any]]


class Options(ArgumentParser):
    """Names with dashes; and what is true or false can be named alone: --all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        if settings.get("type") is bool:
            settings |= dict(nargs="?", const=True)
        return super().add_argument(*(name.replace("_", "-") for name in names), **settings)


class Parser(NamedTuple):
    """The parser of a command line, and what was found in it before it is parsed."""

    options: Options
    arguments: list[str]  # without --grid.FIELD and --span.FIELD
    experiments: Experiments  # all of them, if the command is about one
    searched: dict[str, Any]  # the values of --grid.FIELD and --span.FIELD


def call(
    commands: Sequence[Command],
    of_experiments: dict[str, str],
    arguments: list[str],
    experiments: Callable[[], Experiments],
) -> None:
    """Call the command that the arguments name; arguments as for `parser_of`."""
    parser, arguments, known, searched = parser_of(commands, of_experiments, arguments, experiments)
    chosen = parser.parse_args(arguments)
    function = {command.__name__: command for command in commands}[chosen.subcommand]
    given = chosen[chosen.subcommand].as_dict()
    if chosen.subcommand not in of_experiments:
        function(**given)
        return
    experiment = known.get(given["experiment"])
    with naming_options(experiment):
        function(**with_config(given, experiment) | searched)


def parser_of(
    commands: Sequence[Command],
    of_experiments: dict[str, str],
    arguments: list[str],
    experiments: Callable[[], Experiments],
) -> Parser:
    """Return the parser of these arguments; the documentation reads it too.

    Args:
        commands: Functions; those of experiments get `experiment` and `config`.
        of_experiments: The names of commands about an experiment, and the folders that they write into.
        arguments: The words of the command line.
        experiments: Gives all experiments, if a command needs them.
    """
    parser = Options(
        prog="subquad", version=version("subquad"), description="Attention whose cost and error you choose."
    )
    subcommands = parser.add_subcommands()
    known: Experiments = {}
    searched: dict[str, Any] = {}
    for command in commands:
        name, description = command.__name__, (inspect.getdoc(command) or "").partition("\nArgs:")[0]
        options = Options(description=description)
        subcommands.add_subcommand(name, options, help=description.partition("\n")[0])
        if name in of_experiments:
            if arguments[:1] == [name]:
                known = experiments()
                arguments, searched = add_experiments(options, command, of_experiments[name], arguments, known)
            continue
        lists = {p.name: p for p in inspect.signature(command).parameters.values() if p.annotation == list[str]}
        options.add_function_arguments(command, as_group=False, as_positional=True, skip=set(lists))
        for given, parameter in lists.items():
            help = next(part.description for part in parse(command.__doc__).params if part.arg_name == given)
            if parameter.default is parameter.empty:
                options.add_argument(given, nargs="+", help=help)
            else:
                options.add_argument(given, nargs="*", default=[], help=help)
    return Parser(parser, arguments, known, searched)


def add_experiments(
    options: Options, command: Command, out: str, arguments: list[str], known: Experiments
) -> tuple[list[str], dict[str, Any]]:
    """A subcommand for each experiment. Returns the arguments without --grid.FIELD and the like, and those."""
    own, searched = inspect.signature(command).parameters, {}
    for kind in ("grid", "span"):
        if kind in own:
            arguments, searched[kind] = split_off(arguments, kind)
    if "resume" in own:
        _resume_alone(arguments)
        options.add_argument("--resume", type=str | None, default=None, help="Folder of a run to go on with.")
    experiments = options.add_subcommands(required=False, dest="experiment")
    for name, experiment in known.items():
        about = inspect.cleandoc(experiment.about)
        fields = Options(description=f"{inspect.getdoc(command)}\n\n{about}")
        experiments.add_subcommand(name, fields, help=about.partition("\n")[0])
        place = out if "resume" in own else f"{out}/{name}"  # A folder holds one comparison, or one sweep.
        fields.add_argument("--out", type=str, default=place, help="Folder to write into.")
        names = ", ".join(presets(name))
        fields.add_argument("--preset", type=str | None, default=None, help=f"A config of the package: {names}.")
        fields.add_argument("--config", type=str | None, default=None, help="A YAML file with any of the fields.")
        if "trials" in own:
            fields.add_argument("--trials", type=int, default=20, help="The most trials of a search with --span.")
        is_compared = command.__name__ == "compare"
        fields.add_class_arguments(
            experiment.config, as_group=False, skip=set(experiment.varied) if is_compared else None
        )
        if arguments[1:2] == [name]:
            values = given_fields(experiment, arguments)
            fields.set_defaults(without_varied(experiment, values, arguments) if is_compared else values)
    return arguments, searched


def _resume_alone(arguments: list[str]) -> None:
    """A run that goes on has its config already."""
    given = [argument for argument in arguments[1:] if argument not in ("-h", "--help")]
    first = next((i for i, argument in enumerate(given) if argument.partition("=")[0] == "--resume"), None)
    if first is not None:
        rest = given[:first] + given[first + (1 if "=" in given[first] else 2) :]
        if rest:
            raise UsageError(f"--resume: expected the folder of a run and nothing else, found {' '.join(rest)!r} too")


def with_config(given: dict[str, Any], experiment: Configured[Any] | None) -> dict[str, Any]:
    """The experiment itself, and its fields as its config."""
    if experiment is None:
        return given | {"config": None, "out": ""}
    rest: dict[str, Any] = given.pop(experiment.name)
    kind = experiment.config
    config = kind(**{field.name: rest.pop(field.name) for field in fields(kind) if field.name in rest})
    del rest["config"], rest["preset"]
    return given | rest | {"experiment": experiment, "config": config}


@contextmanager
def naming_options(experiment: Configured[Any] | None) -> Iterator[None]:
    """What is wrong with a field of the config is told of the option that gives it."""
    try:
        yield
    except UsageError as error:
        field, colon, rest = str(error).partition(":")
        if colon and experiment is not None and field in {own.name for own in fields(experiment.config)}:
            raise UsageError(f"--{field.replace('_', '-')}:{rest}") from error
        raise
