"""The command that produced a number, so that a reader can run it again."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from subquad_lab import UsageError
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment


def train_command(experiment: Experiment[Any], configs: Sequence[Training]) -> str:
    """Return the `subquad train` command of runs that differ only in their seed.

    It names the options whose values differ from the defaults, or from the preset that saves the most options.
    """
    config = replace(configs[0], seed=min(each.seed for each in configs), seeds=len(configs))
    bases = {"": experiment.config(), **{f" --preset {name}": base for name, base in _presets(experiment).items()}}
    options = {base: _differing(config, values) for base, values in bases.items()}
    shortest = min(options, key=lambda base: len(options[base]))
    return f"subquad train {experiment.name}{shortest}{''.join(options[shortest])}"


def _presets(experiment: Experiment[Any]) -> dict[str, Training]:
    found = {}
    for name, path in presets(experiment.name).items():
        try:
            found[name] = config_from(experiment, read(path), name)
        except UsageError:  # It needs data that are not installed.
            continue
    return found


def _differing(config: Training, base: Training) -> list[str]:
    pairs = ((field, value) for field, value in vars(config).items() if value != getattr(base, field))
    return [f" --{field.replace('_', '-')} {_as_option(value)}" for field, value in pairs]


def _as_option(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else shlex.quote(str(value))
