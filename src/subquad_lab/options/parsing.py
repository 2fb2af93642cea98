"""The command line as function calls: parameters become options, and docstrings become help texts.

Commands about an experiment have a second level, `subquad train language`, whose options are the fields of the
experiment's config. The values from --preset and --config become the defaults of these options.
"""

import inspect
import re
import textwrap
from argparse import Action
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from subquad_lab import UsageError
from subquad_lab.options.fields import Configured, given_fields, presets, split_off, without_varied

MAY_BE_EMPTY = ("--prompt",)
SHARING = "--sequence-parallel"
SHARING_HELP = "Number of processes that share each sequence, of those started by torchrun."

Command = Callable[..., None]
Experiments = Mapping[str, Configured[Any]]


class Help(DefaultHelpFormatter):
    """Keep paragraphs and indented lines of descriptions, a short usage line, and defaults without Python types."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n[ ]*\n", text)
        return "\n\n".join(
            paragraph.rstrip()
            if paragraph.startswith(" ")
            else textwrap.fill(" ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in paragraphs
        )

    def _format_usage(self, usage: Any, actions: Any, *more: Any, **settings: Any) -> str:
        positionals = [action for action in actions if not action.option_strings]
        line = super()._format_usage(usage, positionals, *more, **settings).replace(" [options]", "")
        return re.sub(r"(usage: [a-z ]*[a-z])", r"\1 [options]", line, count=1)

    def _expand_help(self, action: Action) -> str:
        text = super()._expand_help(action)
        text = re.sub(r"(?:required)?(?:, )?(?:type: .*?)?(?:, (?=default: )|(?=\)$))", "", text)
        text = re.sub(r"default: (True|False)\)$", lambda found: found[0].lower(), text)
        empty = r"\[\]" if "; null: " in text else r"\[\]|null"  # The help says what null means, or the default itself.
        return re.sub(rf" \((?:default: (?:{empty}))?\)$", "", text)


class Options(ArgumentParser):
    """A parser with dashes in option names, and with flags that need no value: --all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, formatter_class=Help, **settings)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        if settings.get("type") is bool:
            settings |= dict(nargs="?", const=True)
        if not names[0].startswith("-"):
            settings["metavar"] = names[0].upper()
        names = tuple(name.rstrip("_").replace("_", "-") for name in names)
        return super().add_argument(*names, **settings)


class Parser(NamedTuple):
    """The parser of a command line, and what was found in it before it is parsed."""

    options: Options
    arguments: list[str]  # without --grid.FIELD and --span.FIELD
    experiments: Experiments  # all of them, if the command is about one
    searched: dict[str, Any]  # the values of --grid.FIELD and --span.FIELD


def call(
    commands: Sequence[Command],
    output_folders: dict[str, str],
    arguments: list[str],
    experiments: Callable[[], Experiments],
) -> None:
    """Call the command named by the arguments; arguments as for `parser_of`."""
    check_options(arguments)
    parser, arguments, known, searched = parser_of(commands, output_folders, arguments, experiments)
    chosen = parser.parse_args(arguments)
    function = {command.__name__: command for command in commands}[chosen.subcommand]
    given = chosen[chosen.subcommand].as_dict()
    if chosen.subcommand not in output_folders:
        own = inspect.signature(function).parameters
        check_positionals(given)
        function(**{name if name in own else f"{name}_": value for name, value in given.items()})
        return
    experiment = known.get(given["experiment"])
    with naming_options(experiment):
        function(**with_config(given, experiment) | searched)


def check_options(arguments: Sequence[str]) -> None:
    """Raise for an empty value, as from an unset shell variable: as a path it would mean the current folder."""
    for before, argument in pairwise(["", *arguments]):
        option, equals, value = argument.partition("=")
        if argument == "" and before.startswith("--") and "=" not in before:
            option, equals = before, "="
        if option.startswith("--") and equals and not value and option not in MAY_BE_EMPTY:
            raise UsageError(f"{option}: expected a value, got ''")


def check_positionals(given: Mapping[str, Any]) -> None:
    """Raise for an empty argument; options are checked before."""
    for name, value in given.items():
        if (value == "" or (isinstance(value, list) and "" in value)) and f"--{name}" not in MAY_BE_EMPTY:
            raise UsageError(f"{name.upper()}: expected a value, got ''")


def parser_of(
    commands: Sequence[Command],
    output_folders: dict[str, str],
    arguments: list[str],
    experiments: Callable[[], Experiments],
) -> Parser:
    """Return the parser of these arguments; the documentation reads it too.

    Args:
        commands: Functions. Those in `output_folders` receive `experiment` and `config`.
        output_folders: Names of the commands that take an experiment, with their default output folders.
        arguments: Words of the command line.
        experiments: Returns all experiments; called only if the command needs them.
    """
    parser = Options(
        prog="subquad", version=version("subquad"), description="Attention whose cost and error you choose."
    )
    subcommands = parser.add_subcommands(
        title="commands", metavar="COMMAND", description="Run `subquad COMMAND --help` for the options of a command."
    )
    known: Experiments = {}
    searched: dict[str, Any] = {}
    for command in commands:
        name, description = command.__name__, (inspect.getdoc(command) or "").partition("\nArgs:")[0]
        options = Options(description=description)
        subcommands.add_subcommand(name, options, help=description.partition("\n")[0])
        if arguments[:1] != [name]:  # Its options are not needed, and adding them takes time.
            continue
        if name not in output_folders:
            add_parameters(options, command)
        else:
            known = experiments()
            arguments, searched = add_experiments(options, command, output_folders[name], arguments, known)
    return Parser(parser, arguments, known, searched)


def add_parameters(options: Options, command: Command) -> None:
    """Add the parameters of a command; lists of strings become positionals that can be repeated."""
    lists = {p.name: p for p in inspect.signature(command).parameters.values() if p.annotation == list[str]}
    options.add_function_arguments(command, as_group=False, as_positional=True, skip=set(lists))
    described = {part.arg_name: part.description for part in parse(command.__doc__ or "").params}
    for name, parameter in lists.items():
        if parameter.default is parameter.empty:
            options.add_argument(name, nargs="+", help=described[name])
        else:
            options.add_argument(name, nargs="*", default=[], help=described[name])


def add_experiments(
    options: Options, command: Command, out: str, arguments: list[str], known: Experiments
) -> tuple[list[str], dict[str, Any]]:
    """Add a subcommand for each experiment.

    Returns:
        The arguments without --grid.FIELD and --span.FIELD, and the values of these.
    """
    own, searched = inspect.signature(command).parameters, {}
    for kind in ("grid", "span"):
        if kind in own:
            arguments, searched[kind] = split_off(arguments, kind)
    if "resume" in own:
        _resume_alone(arguments)
        options.add_argument("--resume", type=str | None, default=None, help="Folder of an interrupted run to resume.")
        options.add_argument(SHARING, type=int, default=1, help=SHARING_HELP)
    experiments = options.add_subcommands(
        required=False, dest="experiment", title="experiments", metavar="EXPERIMENT",
        description=f"Run `subquad {command.__name__} EXPERIMENT --help` for the options of an experiment.",
    )  # fmt: skip
    search = " --grid.lr 0.001,0.01" if "grid" in own else ""
    for name, experiment in known.items():
        about = inspect.cleandoc(experiment.about)
        example = f"Example: subquad {command.__name__} {name} --preset quick{search}"
        description = (inspect.getdoc(command) or "").partition("Example: ")[0]
        fields = Options(description=f"{description}{about}\n\n{example}")
        experiments.add_subcommand(name, fields, help=about.partition("\n")[0])
        if arguments[1:2] != [name] and set(arguments[1:2]) & known.keys():  # Another one is asked for.
            continue
        place = out if "resume" in own else f"{out}/{name}"  # A folder holds one comparison, or one sweep.
        fields.add_argument("--out", type=str, default=place, help="Output folder.")
        names = ", ".join(presets(name))
        fields.add_argument("--preset", type=str | None, default=None, help=f"Built-in config to start from: {names}.")
        fields.add_argument("--config", type=str | None, default=None,
                            help="YAML file with values for any of the options below. If both --preset and --config "
                                 "are given, the later one wins; options given directly override both.")  # fmt: skip
        if "resume" in own:
            fields.add_argument(SHARING, type=int, default=1, help=SHARING_HELP)
        if "trials" in own:
            fields.add_argument("--trials", type=int, default=20, help="Maximum number of trials of a --span search.")
        is_compared = command.__name__ == "compare"
        fields.add_class_arguments(
            experiment.config, as_group=False, skip=set(experiment.varied) if is_compared else None
        )
        if arguments[1:2] == [name]:
            values = given_fields(experiment, arguments)
            fields.set_defaults(without_varied(experiment, values, arguments) if is_compared else values)
    return arguments, searched


def _resume_alone(arguments: list[str]) -> None:
    """Raise if --resume comes with options of the config, which a resumed run keeps."""
    rest = [argument for argument in arguments[1:] if argument not in ("-h", "--help")]
    is_resumed = any(argument.partition("=")[0] == "--resume" for argument in rest)
    for option in ("--resume", SHARING):
        place = next((i for i, argument in enumerate(rest) if argument.partition("=")[0] == option), None)
        if place is not None:
            rest = rest[:place] + rest[place + (1 if "=" in rest[place] else 2) :]
    if is_resumed and rest:
        raise UsageError(f"--resume: expected a run folder and no option but {SHARING}, got also {' '.join(rest)!r}")


def with_config(given: dict[str, Any], experiment: Configured[Any] | None) -> dict[str, Any]:
    """Replace the experiment's name by the experiment, and its fields by a config."""
    if experiment is None:
        return given | {"config": None, "out": ""}
    rest: dict[str, Any] = given.pop(experiment.name)
    if "sequence_parallel" in given:  # before or after the name of the experiment
        is_default = rest["sequence_parallel"] == 1
        rest["sequence_parallel"] = given["sequence_parallel"] if is_default else rest["sequence_parallel"]
    kind = experiment.config
    config = kind(**{field.name: rest.pop(field.name) for field in fields(kind) if field.name in rest})
    del rest["config"], rest["preset"]
    return given | rest | {"experiment": experiment, "config": config}


@contextmanager
def naming_options(experiment: Configured[Any] | None) -> Iterator[None]:
    """Turn an error about a config field into an error about the corresponding option."""
    try:
        yield
    except UsageError as error:
        field, colon, rest = str(error).partition(":")
        if colon and experiment is not None and field in {own.name for own in fields(experiment.config)}:
            raise UsageError(f"--{field.replace('_', '-')}:{rest}") from error
        raise
