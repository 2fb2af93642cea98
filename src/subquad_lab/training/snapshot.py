"""The content of a training checkpoint: parameters, optimizer, random generators, and the position in the data.

    model.NAME           parameters and buffers, including random features
    optimizer.I.NAME     state of parameter I; settings of the groups are in the JSON state
    random.torch.R       torch's generator in process R; those of numpy and Python are in the JSON state
    carry.NAME           recurrent state of all rows

Tensors and the floats in JSON are stored exactly, so a resumed run is bit-for-bit identical to an uninterrupted one.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subquad_lab.system.checksums import Damaged
from subquad_lab.system.out_of_memory import is_out_of_memory
from subquad_lab.training.checkpoint import Checkpoint

Named = dict[str, Tensor]


def pack(prefix: str, tensors: Named) -> Named:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unpack(prefix: str, tensors: Named) -> Named:
    begin = f"{prefix}."
    return {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Named, dict[str, Any]]:
    """Return the tensors of an optimizer, and the rest of its state."""
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
                shapes = f"expected the shape {tuple(parameters[index].shape)}, got {tuple(entry.shape)}"
                raise ValueError(f"optimizer.{index}.{name}: {shapes}")
    optimizer.load_state_dict({"state": state, "param_groups": numbers["groups"]})


def random_numbers() -> tuple[Tensor, dict[str, Any]]:
    """Return the states of this process's generators: torch's, and those of Python and numpy."""
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
    """Seed torch, numpy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load parameters and buffers from a checkpoint; names and shapes must match."""
    try:
        model.load_state_dict(unpack("model", checkpoint.tensors))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).splitlines()
        raise Damaged(
            f"checkpoint {checkpoint.path}: does not fit this model: {' '.join(' '.join(lines[1:3]).split())}"
        ) from error
