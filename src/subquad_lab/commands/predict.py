"""`subquad predict`: which class a trained model takes a picture for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.experiments.images import Images
from subquad_lab.experiments.stored import chosen, trained

# What Pillow decodes by itself: for other kinds it may start programs, such as Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


def run(folder: str, files: list[str]) -> None:
    """A line for each picture: its file, the likeliest class, and the probability of that."""
    made, task = trained(chosen(Path(folder)))
    if not isinstance(task, Images):
        raise UsageError(f"RUN: {made.folder} is not a run of an image model")
    pictures = torch.stack([read_picture(Path(file), *task.pictures.shape) for file in files])
    probabilities = task.predict(pictures).exp()
    for file, row in zip(files, probabilities, strict=True):
        best = int(row.argmax())
        print(f"{file}: {task.pictures.classes[best]}, probability {float(row[best]):.3f}")


def read_picture(path: Path, channels: int, height: int, width: int) -> Tensor:
    """Bytes (channels, height, width): grey or coloured and resized, as the model's own pictures are."""
    from PIL import Image

    if not path.is_file():
        raise UsageError(f"IMAGES: {path} is a folder" if path.is_dir() else f"IMAGES: there is no file {path}")
    try:
        with Image.open(path, formats=FORMATS) as picture:
            limit = Image.MAX_IMAGE_PIXELS or 0
            if picture.width * picture.height > limit:
                raise ValueError(f"{picture.width} x {picture.height} pixels; expected at most {limit:,}")
            made = of_8_bits(picture).convert("RGB" if channels == 3 else "L")
            made = made.resize((width, height), Image.Resampling.BILINEAR)
    except Exception as error:  # A decoder of pictures can fail in any way.
        raise UsageError(f"IMAGES: {path} cannot be read as a picture: {error or type(error).__name__}") from error
    return torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8).view(height, width, channels).permute(2, 0, 1)


def of_8_bits(picture: Any) -> Any:
    """White where it is transparent; 16 bits scaled."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return picture.point(lambda value: value / 256).convert("L")
    if picture.mode in ("I", "F"):
        raise ValueError(f"pixels of the kind {picture.mode}; expected 8 or 16 bits")
    if picture.has_transparency_data:
        ink = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", ink.size, "white"), ink)
    return picture
