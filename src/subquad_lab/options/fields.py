"""Configs: flat, checked against the fields of their experiment, from YAML files and the command line.

A YAML file is data: what would make Python objects (`!!python/object`) is refused by its reader.
"""

from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from subquad_lab import UsageError
from subquad_lab.experiments import experiment
from subquad_lab.options.parsing import wrong_value
from subquad_lab.training.config import Training
from subquad_lab.training.run import CONFIG, Run

PRESETS = Path(__file__).parent / "presets"


def presets(name: str) -> dict[str, Path]:
    """The configs of an experiment that come with the package."""
    return {path.stem: path for path in sorted((PRESETS / name).glob("*.yaml"))}


def given_fields(name: str, arguments: list[str]) -> dict[str, Any]:
    """What --preset and --config say, the later over the earlier."""
    values: dict[str, Any] = {}
    for option, value in _pairs(arguments):
        if option == "--preset":
            if value not in presets(name):
                raise UsageError(f"--preset: expected one of {', '.join(presets(name))}, found {value!r}")
            values |= read(presets(name)[value])
        elif option == "--config":
            values |= fields_of_file(name, Path(value))
    return values


def fields_of_file(name: str, path: Path) -> dict[str, Any]:
    """The fields of a file, each of its type; a run's own config names its experiment too."""
    values = read(path)
    of = values.pop("experiment", name)
    if of != name:
        raise UsageError(f"{path}: a config of the experiment {of!r}, expected {name!r}")
    checked = typed(name, values, path)
    return {field: checked[field] for field in values}


def split_off(arguments: list[str], kind: str) -> tuple[list[str], dict[str, list[Any]]]:
    """--grid.FIELD A,B,C and the like: the arguments without them, and the values of each field."""
    rest, found, i = [], {}, 0
    while i < len(arguments):
        option, equals, value = arguments[i].partition("=")
        i += 1
        if not option.startswith(f"--{kind}."):
            rest.append(option + equals + value)
            continue
        if not equals:
            if i == len(arguments):
                raise UsageError(f"{option}: expected values with commas between, found nothing")
            value, i = arguments[i], i + 1
        found[option.partition(".")[2].replace("-", "_")] = [_value(option, text) for text in value.split(",")]
    return rest, found


def _value(option: str, text: str) -> Any:
    try:
        number = yaml.safe_load(text)
        return float(text) if isinstance(number, str) and _is_number(text) else number  # YAML reads 1e-3 as text.
    except yaml.YAMLError as error:
        raise UsageError(f"{option}: {text!r} is no value: {' '.join(str(error).split())}") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _pairs(arguments: list[str]) -> list[tuple[str, str]]:
    """Options and their values, written with a space or with =."""
    pairs = []
    for argument, after in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.partition("=")
        pairs.append((option, value if equals else after))
    return pairs


def read(path: Path) -> dict[str, Any]:
    """A YAML file with fields and their values."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, IndexError, RecursionError) as error:  # `!!int ""` is none of its own.
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path}: expected fields and their values, found {type(content).__name__}")
    return content


def typed(name: str, values: dict[str, Any], source: object) -> dict[str, Any]:
    """All fields, each of its type; `source` is named where one of them is wrong."""
    kind = experiment(name).Config
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise UsageError(f"{source}: {key!r} is no field of {name}; expected some of {', '.join(known)}")
    try:
        return parser.parse_object(values).as_dict()
    except ArgumentError as error:
        raise UsageError(f"{source}: {wrong_value(error).removeprefix('--')}") from error


def config_from(name: str, values: dict[str, Any], source: object) -> Training:
    """A config from its fields, which also fit each other."""
    try:
        return experiment(name).Config(**typed(name, values, source))
    except UsageError as error:
        if str(error).startswith(f"{source}: "):
            raise
        raise UsageError(f"{source}: {error}") from error


def config_of(run: Run) -> tuple[str, Training]:
    """The experiment of a run and its config."""
    path = run.folder / CONFIG
    content = read(path)
    name = str(content.pop("experiment", None))
    return name, config_from(name, content, path)


def with_values(name: str, config: Training, values: dict[str, Any], source: object) -> Training:
    """The same with other values of some fields."""
    return config_from(name, asdict(config) | values, source)
