"""`subquad predict`: classify image files with a trained model."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.experiments.images import Images
from subquad_lab.experiments.stored import chosen, trained
from subquad_lab.options.files import refuse_files
from subquad_lab.system.regular_file import open_regular
from subquad_lab.system.text import say

# Formats that Pillow decodes itself; for others it may start programs such as Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
CLEAR_POLARITY = 0.95  # mean of the training pictures, from -1 to 1, from which on one of the opposite is unusual


def run(folder: str, files: list[str]) -> None:
    """Print a line for each image: its file, the most likely class, and the probability of that class.

    Files that cannot be read are reported at the end.
    """
    made, task = trained(chosen(Path(folder)))
    if not isinstance(task, Images):
        raise UsageError(f"RUN: expected a run of an image model, got {made.folder}")
    names, pictures, refused = [], [], []
    for file in files:
        try:
            pictures.append(read_picture(Path(file), *task.pictures.shape))
            names.append(file)
        except UsageError as error:
            refused.append(error)
    if pictures:
        _predict(task, names, torch.stack(pictures))
    refuse_files("IMAGES", refused, len(files))


def _predict(task: Images, names: list[str], pictures: Tensor) -> None:
    probabilities = task.predict(pictures).exp()
    mean = float(polarity(task.pictures.train[0]).mean())
    usual = 1 if mean >= CLEAR_POLARITY else -1 if mean <= -CLEAR_POLARITY else 0
    for name, row, found in zip(names, probabilities, polarity(pictures).tolist(), strict=True):
        best = int(row.argmax())
        say(f"{name}: {task.pictures.classes[best]}, probability {float(row[best]):.3f}")
        if usual * found < 0:
            light, dark = ("light on dark", "dark on light")[::usual]
            warnings.warn(f"{name} is {dark}, but the model was trained on images that are {light}; invert it",
                          stacklevel=2)  # fmt: skip


def polarity(pictures: Tensor) -> Tensor:
    """(n,): 1 for pictures (n, channels, height, width) that are lighter inside than on their border, -1 for darker."""
    border = torch.ones(pictures.shape[-2:], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    return (pictures[..., ~border].float().mean((1, 2)) - pictures[..., border].float().mean((1, 2))).sign()


def read_picture(path: Path, channels: int, height: int, width: int) -> Tensor:
    """Return bytes (channels, height, width), converted to the color mode and size of the model's training images."""
    from PIL import Image

    try:
        file = open_regular(path)
    except OSError as error:
        raise UsageError(f"IMAGES: cannot read {path}: {error.strerror}") from error
    try:
        with file, Image.open(file, formats=FORMATS) as picture:
            limit = Image.MAX_IMAGE_PIXELS or 0
            if picture.width * picture.height > limit:
                raise ValueError(f"expected at most {limit:,} pixels, got {picture.width} x {picture.height}")
            made = of_8_bits(picture).convert("RGB" if channels == 3 else "L")
            made = made.resize((width, height), Image.Resampling.BILINEAR)
    except MemoryError:
        raise
    except Exception as error:  # An image decoder can raise anything.
        raise UsageError(f"IMAGES: {path} cannot be read as an image: {error or type(error).__name__}") from error
    return torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8).view(height, width, channels).permute(2, 0, 1)


def of_8_bits(picture: Any) -> Any:
    """Return the image with 8 bits per channel, on a white background if it is transparent."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return picture.point(lambda value: value / 256).convert("L")
    if picture.mode in ("I", "F"):
        raise ValueError(f"expected 8 or 16 bits per channel, got mode {picture.mode}")
    if picture.has_transparency_data:
        ink = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", ink.size, "white"), ink)
    return picture
