"""Converted models on disk: what was learned, next to the name of the model that it belongs to.

    NAME.json           base model and its checksum, method, rank
    NAME.safetensors    feature maps and low-rank matrices

    model, tokenizer = load("runs/convert-001/window-64-hedgehog.json")

The base model is not copied. Nothing is downloaded, and no pickle is read.
"""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from subquad_lab import UsageError
from subquad_lab.models import pretrained
from subquad_lab.models.conversion import Student
from subquad_lab.models.learned_maps import LearnedMethods
from subquad_lab.models.pretrained_decoder import PretrainedDecoder
from subquad_lab.system.checksums import verify_if_listed
from subquad_lab.system.files import read_json
from subquad_lab.system.regular_file import read_regular

MAX_TENSOR_BYTES = 1 << 34
FIELDS: dict[str, Any] = {"base": str, "base_sha256": str, "method": str, "rank": int | None}


def exported(base: str, checksum: str, spec: str, student: Student, rank: int | None) -> dict[str, bytes]:
    """Return the files of a converted model by name.

    Args:
        base: Folder or file of the base model.
        checksum: Checksum of its parameters.
        spec: Name of the method.
        student: The converted model.
        rank: Rank of the adaptation; None for none.
    """
    name = re.sub(r"[^\w.-]", "-", spec)
    config = dict(zip(FIELDS, (base, checksum, spec, rank), strict=True))
    tensors = {own: tensor.detach().cpu().contiguous() for own, tensor in _tensors(student).items()}
    return {
        f"{name}.json": json.dumps(config, indent=1).encode(),
        f"{name}.safetensors": safetensors.torch.save(tensors),
    }


def _tensors(student: Student) -> dict[str, Any]:
    maps = {f"maps.{name}": tensor for name, tensor in student.learned.maps.named_parameters()}
    return maps | {f"adapters.{name}": tensor for name, tensor in student.adapters.items()}


def load(path: str | Path, base: str | None = None) -> tuple[Any, Any]:
    """Load a converted transformers model and its tokenizer.

    Args:
        path: The file NAME.json of a run.
        base: Folder or file of the base model. Default: where it was when it was converted.

    Returns:
        The transformers model, whose `generate` keeps states of fixed size, and its tokenizer.

    Raises:
        UsageError: A file is missing or damaged, or the base model is another one.
    """
    path = Path(path)
    weights = path.with_suffix(".safetensors")
    for file in (path, weights):
        verify_if_listed(file)
    config = read_json(path)
    for name, kind in FIELDS.items():
        if not isinstance(config.get(name), kind):
            raise UsageError(f"{path}: expected {name!r}, got {config.get(name)!r}")
    network, tokenizer = pretrained.load(base or config["base"], with_head=True)
    teacher = PretrainedDecoder(network.requires_grad_(False))
    if teacher.checksum() != config["base_sha256"]:
        raise UsageError(f"{path}: {base or config['base']} is not the model that was converted: its parameters differ")
    made = LearnedMethods(config["method"], teacher.shape)
    decoder = teacher.converted(made.methods)
    adapters = {} if config["rank"] is None else decoder.adapt(config["rank"])
    _fill(_tensors(Student(made, decoder, adapters)), weights)
    return decoder.network, tokenizer


def _fill(parameters: dict[str, Any], path: Path) -> None:
    """Copy the tensors of a file into parameters; names and shapes must match."""
    try:
        found = safetensors.torch.load(read_regular(path, MAX_TENSOR_BYTES))
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if shapes != expected:
        wrong = next(name for name in sorted(shapes.keys() | expected.keys()) if shapes.get(name) != expected.get(name))
        raise UsageError(f"{path}: expected {expected.get(wrong)} for {wrong}, got {shapes.get(wrong)}")
    for name, parameter in parameters.items():
        parameter.data.copy_(found[name])
