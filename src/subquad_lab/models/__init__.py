"""The networks of the experiments, one file for each."""

from torch import nn

from subquad_lab import UsageError
from subquad_lab.system.memory import memory

COPIES = 4  # of the parameters: themselves, their gradients, and what Adam keeps of both


def parameters(model: nn.Module) -> dict[str, int]:
    """By part, and in all."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts | {"total": sum(parts.values())}


def refuse_too_large(total: int, what: str) -> None:
    """A model with so many parameters, before it is made."""
    needed = COPIES * 4 * total
    if needed > memory():
        raise UsageError(f"{what} needs {needed / 2**30:,.0f} GiB to be trained, of {memory() / 2**30:,.0f} GiB that "
                         "this machine has")  # fmt: skip
