"""The command that produced a number, so that a reader can run it again."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from subquad_lab.options.fields import presets, read
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment


def train_command(experiment: Experiment[Any], configs: Sequence[Training]) -> str:
    """Return the `subquad train` command of runs that differ only in their seed.

    It names the options whose values differ from the defaults, or from the preset that saves the most options.
    """
    first, *others = sorted(each.seed for each in configs)
    is_range = others == list(range(first + 1, first + len(configs)))
    config = replace(configs[0], seed=first, seeds=len(configs) if is_range else 1)
    options = {base: _differing(config, values) for base, values in _bases(experiment).items()}
    shortest = min(options, key=lambda base: len(options[base]))
    command = f"subquad train {experiment.name}{shortest}{''.join(options[shortest])}"
    return command if is_range else f"{command}  # and with --seed {', '.join(map(str, others))}"


def _bases(experiment: Experiment[Any]) -> dict[str, dict[str, Any]]:
    """Return the values of all fields by default, and with each preset."""
    defaults = vars(experiment.config())
    found = {f" --preset {name}": defaults | read(path) for name, path in presets(experiment.name).items()}
    return {"": defaults, **found}


def _differing(config: Training, base: dict[str, Any]) -> list[str]:
    pairs = ((field, value) for field, value in vars(config).items() if value != base[field])
    return [f" --{field.replace('_', '-')} {_as_option(value)}" for field, value in pairs]


def _as_option(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else shlex.quote(str(value))
