"""Flat configs from YAML files and the command line, validated against the fields of an experiment.

YAML files are data only, read by the strict loader of `yaml_values`.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from subquad_lab import UsageError
from subquad_lab.options.yaml_values import option_value, yaml_value
from subquad_lab.system.checksums import verify_if_listed
from subquad_lab.system.regular_file import read_regular

MAX_CONFIG_BYTES = 1 << 16  # a hundred times the size of a config
PRESETS = Path(__file__).parent / "presets"
KINDS = {"int": "an integer", "float": "a number", "bool": "true or false"}
C_co = TypeVar("C_co", covariant=True)


class Configured(Protocol[C_co]):
    """The part of an experiment that option parsing uses."""

    @property
    def name(self) -> str:
        """Name on the command line, and of the folder of its presets."""

    @property
    def about(self) -> str:
        """Description for the help text."""

    @property
    def config(self) -> type[C_co]:
        """Dataclass whose fields are the options."""

    @property
    def varied(self) -> Sequence[str]:
        """Fields that a comparison sets by itself."""


def presets(name: str) -> dict[str, Path]:
    """Return the built-in configs of an experiment, by name."""
    return {path.stem: path for path in sorted((PRESETS / name).glob("*.yaml"))}


def given_fields(experiment: Configured[Any], arguments: list[str]) -> dict[str, Any]:
    """Return the values from --preset and --config; the later option overrides the earlier."""
    values: dict[str, Any] = {}
    own = presets(experiment.name)
    for option, value in _pairs(arguments):
        if option == "--preset":
            if value not in own:
                raise UsageError(f"--preset: expected one of {', '.join(own)}, got {value!r}")
            values |= read(own[value])
        elif option == "--config":
            values |= fields_of_file(experiment, Path(value))
    return values


def without_varied(experiment: Configured[Any], values: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The values without the fields that a comparison sets by itself: another value there would be ignored."""
    given = (option for option, _ in _pairs(arguments) if option.startswith("--"))
    named = {option.removeprefix("--").replace("-", "_") for option in given}
    for field in experiment.varied:
        default = getattr(experiment.config, field)
        if field in named or values.get(field, default) != default:
            option = f"--{field.replace('_', '-')}"
            raise UsageError(f"{option}: compare sets it for each variant; expected none, or `subquad train "
                             f"{experiment.name} {option}` for a single one")  # fmt: skip
    return {field: value for field, value in values.items() if field not in experiment.varied}


def fields_of_file(experiment: Configured[Any], path: Path) -> dict[str, Any]:
    """Return the validated fields of a YAML file. The config file of a run also names its experiment."""
    verify_if_listed(path)
    values = read(path)
    of = values.pop("experiment", experiment.name)
    if of != experiment.name:
        raise UsageError(f"{path}: expected a config of the experiment {experiment.name!r}, got one of {of!r}")
    checked = typed(experiment, values, path)
    return {field: checked[field] for field in values}


def split_off(arguments: list[str], kind: str) -> tuple[list[str], dict[str, list[Any]]]:
    """Split off options such as --grid.FIELD A,B,C.

    Returns:
        The other arguments, and the values of each field.
    """
    rest, found, i = [], {}, 0
    while i < len(arguments):
        option, equals, value = arguments[i].partition("=")
        i += 1
        if not option.startswith(f"--{kind}."):
            rest.append(option + equals + value)
            continue
        if not equals:
            if i == len(arguments):
                raise UsageError(f"{option}: expected values separated by commas, got nothing")
            value, i = arguments[i], i + 1
        found[option.partition(".")[2].replace("-", "_")] = [_value(option, text) for text in value.split(",")]
    return rest, found


def _value(option: str, text: str) -> Any:
    try:
        return option_value(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{option}: invalid value {text!r}: {' '.join(str(error).split())}") from error


def _pairs(arguments: list[str]) -> list[tuple[str, str]]:
    """Return options with their values, whether separated by a space or by =."""
    pairs = []
    for argument, after in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.partition("=")
        pairs.append((option, value if equals else after))
    return pairs


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file that maps fields to values."""
    try:
        content = yaml_value(read_regular(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path}: expected a mapping from field names to values, got {type(content).__name__}")
    return content


def typed(experiment: Configured[Any], values: dict[str, Any], source: object) -> dict[str, Any]:
    """Return all fields of a config, converted to their types; errors name `source`."""
    kind = experiment.config
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise UsageError(f"{source}: unknown field {key!r}; {experiment.name} has: {', '.join(known)}")
    accepted = get_type_hints(kind)
    for key, value in values.items():  # The parser does not check null.
        if value is None and type(None) not in get_args(accepted[key]):
            kinds = KINDS.get(getattr(accepted[key], "__name__", ""), "a value")
            raise UsageError(f"{source}: {key}: expected {kinds}, got null")
    try:
        found: dict[str, Any] = parser.parse_object(values).as_dict()
        return found
    except ArgumentError as error:
        raise UsageError(f"{source}: {wrong_value(error).removeprefix('--')}") from error


def config_from(experiment: Configured[C_co], values: dict[str, Any], source: object) -> C_co:
    """Build a config from its fields and validate them together; errors name `source`."""
    try:
        return experiment.config(**typed(experiment, values, source))
    except UsageError as error:
        if str(error).startswith(f"{source}: "):
            raise
        raise UsageError(f"{source}: {error}") from error


def with_values(experiment: Configured[C_co], config: Any, values: dict[str, Any], source: object) -> C_co:
    """Return a copy of a config with other values for some fields."""
    return config_from(experiment, asdict(config) | values, source)


def wrong_value(error: Exception) -> str:
    """Rewrite the parser's message, which is about keys and Python types, in terms of options."""
    kinds = r"(?:<class '(int|float|bool)'>|typing.Literal\[(.*?)\])"
    if found := re.match(rf'Parser key "([\w.]+)":.*?Expected a {kinds}.*value: (.*)', str(error), re.DOTALL):
        name, kind, choices, value = found.groups()
        option = name.rpartition(".")[2].replace("_", "-")
        return f"--{option}: expected {KINDS[kind] if kind else f'one of {choices}'}, got {value!r}"
    text = " ".join(str(error).split())
    if "arguments are required: " in text:  # The parser calls a positional COMMAND.name.
        text = re.sub(r"\b\w+\.(\w+)", lambda found: found[1].upper(), text)
    return text
