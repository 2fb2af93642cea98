"""Distributed training: this process among those started by torchrun.

rank = row * sharing + place     `sharing` consecutive processes have the same rows, and a part of each sequence
"""

from typing import Any

import torch
import torch.distributed as dist
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


def sequence_group(sharing: int) -> dist.ProcessGroup | None:
    """Return the group of processes that share their sequences with this one; None if each has its own."""
    if sharing == 1:
        return None
    group: dist.ProcessGroup = dist.new_subgroups(sharing)[0]
    return group


def check_sharing(sharing: int) -> None:
    """Raise unless the processes can be divided into groups of `sharing`."""
    count = processes().num_processes
    if sharing < 1 or count % sharing:
        raise UsageError(
            f"--sequence-parallel: expected a divisor of the number of processes, {count}, got {sharing}; start "
            "more of them with torchrun --nproc-per-node"
        )


def refuse_several(command: str) -> None:
    """Raise if a command that trains several runs was started by torchrun."""
    if processes().num_processes > 1:
        raise UsageError(f"{command}: expected one process, got {processes().num_processes}; start it without torchrun")
