"""This process among those that torchrun has started, or alone."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from subquad_lab import UsageError


def processes() -> PartialState:
    """Their number, and which of them this is."""
    return PartialState(cpu=not torch.accelerator.is_available())  # Without a GPU it must be told to use gloo.


def agreed(value: Any) -> Any:
    """What the main process says, in all processes."""
    processes()  # Before accelerate sets itself up without gloo.
    said = [value]
    broadcast_object_list(said)
    return said[0]


def refuse_several(command: str) -> None:
    """What makes several runs has one process: each of its runs may have several, not all of it."""
    if processes().num_processes > 1:
        raise UsageError(
            f"{command}: expected one process, got {processes().num_processes}; start it without torchrun"
        )
