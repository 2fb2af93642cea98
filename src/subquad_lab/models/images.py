"""Two convolutions that halve the image, by pooling or by strides, then three linear layers.

    pool     conv 3x3, pad 1 - relu - max of 2x2    28 -> 28 -> 14      stride    conv 3x3, pad 1, stride 2  28 -> 14
             conv 3x3 - relu - max of 2x2           14 -> 12 -> 6                 conv 3x3, stride 2         14 -> 6
    16 * 6 * 6 = 576 -> 320 - relu - dropout -> 120 - relu -> classes - log softmax

Pooling has no parameters: for 28x28 grayscale images and 4 classes, both networks have
80 + 1,168 + 184,640 + 38,520 + 484 = 224,892.
"""

from typing import Literal

from torch import Tensor, nn

Downsample = Literal["pool", "stride"]


class ConvNet(nn.Module):
    """Images (b, channels, height, width) with values in [0, 1] -> log probabilities (b, classes)."""

    def __init__(
        self, channels: int, height: int, width: int, classes: int, downsample: Downsample, dropout: float
    ) -> None:
        super().__init__()
        step = 2 if downsample == "stride" else 1
        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=step, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, stride=step), nn.ReLU())
        self.halve = nn.MaxPool2d(2) if downsample == "pool" else nn.Identity()
        seen = 16 * halved_twice(height, downsample) * halved_twice(width, downsample)
        self.decide = nn.Sequential(
            nn.Linear(seen, 320), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(320, 120), nn.ReLU(),
            nn.Linear(120, classes), nn.LogSoftmax(-1),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.decide(self.halve(self.second(self.halve(self.first(pictures)))).flatten(1))
        return found


def halved_twice(length: int, downsample: Downsample) -> int:
    """Return the side length after the convolutions; below 1, the image is too small."""
    if downsample == "pool":
        return (length // 2 - 2) // 2
    return ((length + 1) // 2 - 1) // 2
