"""The reference of the command line, written from its parser: nothing is typed twice.

Options of `train`, `compare` and `sweep` that are fields of an experiment's config are listed once: those that all
experiments have, with the defaults of each, and then those of each experiment.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from subquad_lab import cli
from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.options.parsing import parser_of
from subquad_lab.training.config import Training

SHARED = [field.name for field in fields(Training)]


def parser(command: str) -> Any:
    """Return the parser of a subcommand."""
    options = parser_of(cli.COMMANDS, cli.OUTPUT_FOLDERS, [command], lambda: EXPERIMENTS).options
    return subparsers(options)[command]


def subparsers(options: Any) -> dict[str, Any]:
    return dict(options._subcommands_action._name_parser_map)


def kind(action: Any) -> str:
    """Return what an option takes, in words."""
    hint = getattr(action, "_typehint", None)
    hints = [part for part in get_args(hint) if part is not type(None)] if get_origin(hint) is not Literal else []
    hint = hints[0] if hints else hint
    if get_origin(hint) is Literal:
        return " \\| ".join(f"`{choice}`" for choice in get_args(hint))
    return {int: "integer", float: "number", bool: "flag"}.get(hint, "text")  # type: ignore[call-overload]


def entry(action: Any, default: str | None = None) -> str:
    """Return an option as an entry of a definition list."""
    name = action.option_strings[-1] if action.option_strings else action.dest.upper()
    several = "" if action.option_strings or action.nargs is None else " ..."
    if default is None:
        default = "" if action.default in (None, []) else f"default `{action.default}`"
    facts = ", ".join(fact for fact in (kind(action), default) if fact)
    text = " ".join(action.help.split()).replace("|", "\\|")
    return f"`{name}{several}` ({facts})\n:   {text}\n"


def options_of(actions: Iterable[Any]) -> list[Any]:
    return [action for action in actions if type(action).__name__ not in ("_HelpAction", "ActionSubCommands")]


def defaults(field: str) -> str:
    """Return the default of a shared field, and those of the experiments that have another."""
    own = {name: {f.name: f.default for f in fields(e.config)}[field] for name, e in EXPERIMENTS.items()}
    usual = {f.name: f.default for f in fields(Training)}[field]
    others = [f"`{value}` for {name}" for name, value in own.items() if value != usual]
    first = "no default" if usual is None else f"default `{usual}`"
    return ", ".join([first, *others]) if others or usual is not None else ""


def described(options: Any) -> str:
    return "\n\n".join(" ".join(part.split()) for part in options.description.split("\n\n"))


def command_section(command: str) -> str:
    """Return the section of one subcommand."""
    options = parser(command)
    parts = [f"## subquad {command}", described(options), *map(entry, options_of(options._actions))]
    if command in cli.OUTPUT_FOLDERS:
        by_name = subparsers(options)
        parts.insert(2, f"`subquad {command} EXPERIMENT`, where `EXPERIMENT` is one of {', '.join(by_name)}. Any "
                        "[field of the experiment](#fields-of-all-experiments) is an option as well.")  # fmt: skip
        parts += of_all_experiments(command, by_name)
    return "\n\n".join(parts)


def of_all_experiments(command: str, by_name: dict[str, Any]) -> list[str]:
    """Return the options that are not fields of a config; what they say may differ from experiment to experiment."""
    entries = []
    for own in zip(*(not_fields(name, options) for name, options in by_name.items()), strict=True):
        first = own[0]
        default = f"default `{first.default}`" if first.default else ""
        if len({action.default for action in own}) > 1:
            default = f"default `{command}/EXPERIMENT`"
        found = entry(first, default)
        if len({action.help for action in own}) > 1:
            texts = (f"    - `{name}`: {action.help}" for name, action in zip(by_name, own, strict=True))
            found = "\n".join([found.partition("\n")[0], ":   By experiment:\n", *texts, ""])
        entries.append(found)
    return entries


def not_fields(name: str, options: Any) -> list[Any]:
    own = {field.name for field in fields(EXPERIMENTS[name].config)}
    return [action for action in options_of(options._actions) if action.dest not in own]


def field_sections() -> list[str]:
    """Return the fields that all experiments have, then those of each."""
    by_name = {name: options_of(options._actions) for name, options in subparsers(parser("train")).items()}
    shared = {action.dest: action for action in by_name["language"]}
    parts = ["## Fields of all experiments", *(entry(shared[name], defaults(name)) for name in SHARED)]
    own_of_train = {"out", "preset", "config"}
    for name, actions in by_name.items():
        own = [action for action in actions if action.dest not in {*SHARED, *own_of_train}]
        batch = next(action for action in actions if action.dest == "batch")
        parts += [f"## Fields of {name}", *(entry(action) for action in [batch, *own])]
    return parts


def section() -> str:
    """Return the reference of all subcommands."""
    return "\n\n".join([*(command_section(command.__name__) for command in cli.COMMANDS), *field_sections()])
