"""Distributed training: this process among those started by torchrun."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from subquad_lab import UsageError


def processes() -> PartialState:
    """Return the number of processes and the rank of this one."""
    return PartialState(cpu=not torch.accelerator.is_available())  # Without a GPU, `cpu=True` selects gloo.


def agreed(value: Any) -> Any:
    """Return the main process's value in all processes."""
    processes()  # Initialize with gloo before accelerate initializes without it.
    values = [value]
    broadcast_object_list(values)
    return values[0]


def refuse_several(command: str) -> None:
    """Raise if a command that trains several runs was started by torchrun."""
    if processes().num_processes > 1:
        raise UsageError(f"{command}: expected one process, got {processes().num_processes}; start it without torchrun")
