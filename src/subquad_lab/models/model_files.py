"""The files of a model, checked before transformers reads them: what is read, and how much it can ask for.

Only regular files, weights in safetensors or GGUF, settings that are JSON objects, and no more layers and parameters
than the weights can hold: a number in a settings file could otherwise ask for endless time or memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from subquad_lab.models.gguf_header import check_gguf
from subquad_lab.system.files import read_json
from subquad_lab.system.regular_file import open_regular, read_regular

MAX_JSON_BYTES = 1 << 28  # of a tokenizer; those of large vocabularies have 30 MB
OBJECTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
INDEX = "model.safetensors.index.json"
MAX_PARAMETERS_PER_BYTE = 8  # one bit each


@dataclass(frozen=True)
class Weights:
    """How many tensors and bytes a model has on disk."""

    tensors: int
    size: int


def checked_weights(path: Path) -> Weights:
    """Check a .gguf file or a folder; raise OSError, ValueError or SafetensorError if a file is malformed."""
    if not path.is_dir():
        return Weights(check_gguf(path), path.stat().st_size)
    files = [file for file in sorted(path.iterdir()) if not file.is_dir()]
    for file in files:
        open_regular(file).close()
        if file.name in OBJECTS:
            read_json(file, MAX_JSON_BYTES)
        elif file.suffix in (".json", ".jinja", ".txt"):
            read_regular(file, MAX_JSON_BYTES)
    if not (path / "config.json").is_file():
        raise ValueError("it has no config.json")
    if (path / INDEX).is_file():
        _check_index(path)
    parts = [file for file in files if file.suffix == ".safetensors"]
    if not parts:
        raise ValueError("it has no weights: expected a .safetensors file")
    return Weights(sum(map(_tensors, parts)), sum(file.stat().st_size for file in parts))


def _check_index(folder: Path) -> None:
    """Raise unless the index maps tensors to files of this folder."""
    places = read_json(folder / INDEX, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f'{INDEX}: expected an object of file names under "weight_map"')
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{INDEX}: expected a file of this folder, got {name[:80]!r}")


def _tensors(file: Path) -> int:
    with safe_open(file, "pt") as content:
        return len(content.keys())


def check_size(config: Any, make: Any, weights: Weights) -> None:
    """Raise ValueError if a config asks for more layers or parameters than the weights can hold.

    Args:
        config: A config of transformers.
        make: Makes a model from it.
        weights: What is on disk.
    """
    layers = config.get_text_config().num_hidden_layers
    if type(layers) is not int or not 1 <= layers <= weights.tensors:
        raise ValueError(f"expected 1 to {weights.tensors:,} layers for {weights.tensors:,} tensors, got {layers}")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make(config).parameters())
    if count > MAX_PARAMETERS_PER_BYTE * weights.size:
        most = MAX_PARAMETERS_PER_BYTE * weights.size
        raise ValueError(f"expected at most {most:,} parameters for {weights.size:,} bytes of weights, got {count:,}")
