"""The networks of the experiments, one file per experiment."""

from torch import nn

from subquad_lab import UsageError
from subquad_lab.system.memory import memory

COPIES = 4  # of the parameters: values, gradients, and Adam's two moments


def parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters by module, and in total."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts | {"total": sum(parts.values())}


def refuse_too_large(total: int, what: str) -> None:
    """Raise if a model with `total` parameters cannot be trained in memory, before it is created."""
    needed = COPIES * 4 * total
    if needed > memory():
        raise UsageError(f"{what} needs {needed / 2**30:,.0f} GiB for training, but this machine has "
                         f"{memory() / 2**30:,.0f} GiB; use a smaller model")  # fmt: skip
