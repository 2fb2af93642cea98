"""What a checkpoint of a training run holds: parameters, optimizer, random numbers, and the place in the data.

    model.NAME           parameters and buffers, random features among them
    optimizer.I.NAME     of parameter I; settings of the groups are in the state
    random.torch.R       the generator of process R; those of numpy and Python are in the state
    carry.NAME           what the model remembers of the text before, all rows

Tensors keep their bits, and so do the floats of JSON: a run that goes on from here does not differ in a bit from one
that was never stopped.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subquad_lab.training.checkpoint import Checkpoint, Damaged

Named = dict[str, Tensor]


def pack(prefix: str, tensors: Named) -> Named:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unpack(prefix: str, tensors: Named) -> Named:
    begin = f"{prefix}."
    return {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Named, dict[str, Any]]:
    """Its tensors, and its numbers."""
    content = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, entries in content["state"].items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                tensors[f"optimizer.{index}.{name}"] = entry
            else:
                numbers[f"{index}.{name}"] = entry
    return tensors, {"groups": content["param_groups"], "numbers": numbers}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Named, numbers: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, entry in [*unpack("optimizer", tensors).items(), *numbers["numbers"].items()]:
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = entry
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor) and entry.dim() and entry.shape != parameters[index].shape:
                shapes = f"{tuple(entry.shape)}, where {tuple(parameters[index].shape)} was expected"
                raise ValueError(f"optimizer.{index}.{name} has the shape {shapes}")
    optimizer.load_state_dict({"state": state, "param_groups": numbers["groups"]})


def random_numbers() -> tuple[Tensor, dict[str, Any]]:
    """Of this process: torch's generator, and those of Python and numpy."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    numpy_state = [name, np.asarray(keys).tolist(), position, has_gauss, cached]
    version, numbers, gauss = random.getstate()
    return torch.get_rng_state(), {"python": [version, list(numbers), gauss], "numpy": numpy_state}


def set_random_numbers(generator: Tensor, others: dict[str, Any]) -> None:
    torch.set_rng_state(generator)
    version, numbers, gauss = others["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = others["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


def seed_all(seed: int) -> None:
    """torch, numpy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Its parameters and buffers; names and shapes must be those of the model."""
    try:
        model.load_state_dict(unpack("model", checkpoint.tensors))
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise Damaged(
            f"checkpoint {checkpoint.path}: not of this model: {' '.join(' '.join(lines[1:3]).split())}"
        ) from error
