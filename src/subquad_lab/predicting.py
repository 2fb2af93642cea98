"""`subquad predict`: which class a trained model takes a picture for."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.runs import trained
from subquad_lab.series import chosen


def run(folder: str, files: list[str]) -> None:
    """A line for each picture: its file, the likeliest class, and the probability of that."""
    made, task = trained(chosen(folder))
    if not hasattr(task, "predict"):
        raise UsageError(f"RUN: {made.folder} is not a run of an image model")
    pictures = torch.stack([read_picture(Path(file), *task.pictures.shape) for file in files])
    probabilities = task.predict(pictures).exp()
    for file, row in zip(files, probabilities, strict=True):
        best = int(row.argmax())
        print(f"{file}: {task.pictures.classes[best]}, probability {float(row[best]):.3f}")


def read_picture(path: Path, channels: int, height: int, width: int) -> Tensor:
    """Bytes (channels, height, width): grey or coloured and resized, as the model's own pictures are.

    What is transparent becomes white, and 16 bits become 8.
    """
    from PIL import Image

    if not path.is_file():
        raise UsageError(f"IMAGES: {path} is a folder" if path.is_dir() else f"IMAGES: there is no file {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                made = flat(picture).convert("RGB" if channels == 3 else "L")
                made = made.resize((width, height), Image.Resampling.BILINEAR)
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise UsageError(f"IMAGES: {path} cannot be read as a picture: {error}") from error
    return torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8).view(height, width, channels).permute(2, 0, 1)


def flat(picture: Any) -> Any:
    """On white where it is transparent; of 8 bits."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return picture.point(lambda value: value / 256).convert("L")
    if picture.has_transparency_data:
        ink = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", ink.size, "white"), ink)
    return picture
