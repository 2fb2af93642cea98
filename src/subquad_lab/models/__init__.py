"""The networks of the experiments, one file for each."""

from torch import nn


def parameters(model: nn.Module) -> dict[str, int]:
    """By part, and in all."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts | {"total": sum(parts.values())}
