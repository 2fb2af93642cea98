"""From the words of the command line to the call of a function: its parameters are options, its docstring is the help.

Commands of experiments have a second level, `subquad train language`, whose options are the fields of the experiment's
config; what --preset and --config say become their defaults.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from docstring_parser import parse
from jsonargparse import ArgumentParser

from subquad_lab import UsageError

Command = Callable[..., None]
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


class Options(ArgumentParser):
    """Names with dashes; and what is true or false can be named alone: --all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        if settings.get("type") is bool:
            settings |= dict(nargs="?", const=True)
        return super().add_argument(*(name.replace("_", "-") for name in names), **settings)


def call(commands: Sequence[Command], of_experiments: dict[str, str], arguments: list[str]) -> None:
    """Call the command that the arguments name. Experiments are imported for the commands that need them."""
    parser = Options(
        prog="subquad", version=version("subquad"), description="Attention whose cost and error you choose."
    )
    subcommands = parser.add_subcommands()
    searched: dict[str, Any] = {}
    for command in commands:
        name, description = command.__name__, (inspect.getdoc(command) or "").partition("\nArgs:")[0]
        options = Options(description=description)
        subcommands.add_subcommand(name, options, help=description.partition("\n")[0])
        if name in of_experiments:
            if arguments[:1] == [name]:
                arguments, searched = add_experiments(options, command, of_experiments[name], arguments)
            continue
        lists = {p.name: p for p in inspect.signature(command).parameters.values() if p.annotation == list[str]}
        options.add_function_arguments(command, as_group=False, as_positional=True, skip=set(lists))
        for given, parameter in lists.items():
            help = next(part.description for part in parse(command.__doc__).params if part.arg_name == given)
            if parameter.default is parameter.empty:
                options.add_argument(given, nargs="+", help=help)
            else:
                options.add_argument(given, nargs="*", default=[], help=help)

    chosen = parser.parse_args(arguments)
    function = {command.__name__: command for command in commands}[chosen.subcommand]
    given = chosen[chosen.subcommand].as_dict()
    if chosen.subcommand not in of_experiments:
        function(**given)
        return
    with naming_options(given["experiment"]):
        function(**with_config(given) | searched)


def add_experiments(
    options: Options, command: Command, out: str, arguments: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """A subcommand for each experiment. Returns the arguments without --grid.FIELD and the like, and those."""
    from subquad_lab.experiments import EXPERIMENTS, experiment
    from subquad_lab.options.fields import given_fields, presets, split_off

    own, searched = inspect.signature(command).parameters, {}
    for kind in ("grid", "span"):
        if kind in own:
            arguments, searched[kind] = split_off(arguments, kind)
    if "resume" in own:
        _resume_alone(arguments)
        options.add_argument("--resume", type=str | None, default=None, help="Folder of a run to go on with.")
    experiments = options.add_subcommands(required=False, dest="experiment")
    for name in EXPERIMENTS:
        about = inspect.getdoc(experiment(name)) or ""
        fields = Options(description=f"{inspect.getdoc(command)}\n\n{about}")
        experiments.add_subcommand(name, fields, help=about.partition("\n")[0])
        place = out if "resume" in own else f"{out}/{name}"  # A folder holds one comparison, or one sweep.
        fields.add_argument("--out", type=str, default=place, help="Folder to write into.")
        names = ", ".join(presets(name))
        fields.add_argument("--preset", type=str | None, default=None, help=f"A config of the package: {names}.")
        fields.add_argument("--config", type=str | None, default=None, help="A YAML file with any of the fields.")
        if "trials" in own:
            fields.add_argument("--trials", type=int, default=20, help="The most trials of a search with --span.")
        fields.add_class_arguments(experiment(name).Config, as_group=False)
        if arguments[1:2] == [name]:
            fields.set_defaults(given_fields(name, arguments))
    return arguments, searched


def _resume_alone(arguments: list[str]) -> None:
    """A run that goes on has its config already."""
    given = [argument for argument in arguments[1:] if argument not in ("-h", "--help")]
    first = next((i for i, argument in enumerate(given) if argument.partition("=")[0] == "--resume"), None)
    if first is not None:
        rest = given[:first] + given[first + (1 if "=" in given[first] else 2) :]
        if rest:
            raise UsageError(f"--resume: expected the folder of a run and nothing else, found {' '.join(rest)!r} too")


def with_config(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of an experiment as its config."""
    from subquad_lab.experiments import experiment

    name = given["experiment"]
    if name is None:
        return given | {"config": None, "out": ""}
    rest, kind = given.pop(name), experiment(name).Config
    config = kind(**{field.name: rest.pop(field.name) for field in fields(kind)})
    del rest["config"], rest["preset"]
    return given | rest | {"config": config}


@contextmanager
def naming_options(name: str | None) -> Iterator[None]:
    """What is wrong with a field of the config is told of the option that gives it."""
    from subquad_lab.experiments import experiment

    try:
        yield
    except UsageError as error:
        field, colon, rest = str(error).partition(":")
        if colon and name is not None and field in {own.name for own in fields(experiment(name).Config)}:
            raise UsageError(f"--{field.replace('_', '-')}:{rest}") from error
        raise


def wrong_value(error: Exception) -> str:
    """The parser speaks of keys, classes and unions; say which option was wrong, and what it takes."""
    kinds = r"(?:<class '(int|float|bool)'>|typing.Literal\[(.*?)\])"
    if found := re.match(rf'Parser key "([\w.]+)":.*?Expected a {kinds}.*value: (.*)', str(error), re.DOTALL):
        name, kind, choices, value = found.groups()
        option = name.rpartition(".")[2].replace("_", "-")
        return f"--{option}: expected {KINDS[kind] if kind else f'one of {choices}'}, found {value!r}"
    missing = r"(arguments are required: )\w+\.(\w+)"  # of the parser's own name for a positional
    text = re.sub(missing, lambda found: found[1] + found[2].upper(), str(error))
    return " ".join(text.split())
