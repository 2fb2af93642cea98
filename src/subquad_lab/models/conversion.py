"""A trained decoder and what it is converted to, trained in stages.

    exact      cross-entropy of the decoder itself, with exact attention (unless it comes trained)
    transfer   for each layer and text, |out - exact|^2 / |exact|^2 on the layer's own inputs: trains the feature maps
    adapt      cross-entropy of the converted decoder: trains matrices of low rank on its projections

Each step of `transfer` runs the decoder once, without gradients, for all methods: the loss of a layer depends only on
its own map. Decoders trained from scratch with each method, for comparison, learn in every stage. Nothing is shared
between the parameters of two methods, so they are trained as if alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad_lab.models.decoders import Decoder, WordDecoder
from subquad_lab.models.language import Transformer
from subquad_lab.models.learned_maps import LearnedMethods
from subquad_lab.models.pretrained import Layer
from subquad_lab.options.methods import parse_method

Stage = Literal["exact", "transfer", "adapt"]


class Student(NamedTuple):
    """A converted decoder."""

    learned: LearnedMethods
    decoder: Decoder
    adapters: dict[str, nn.Parameter]


class Conversion(nn.Module):
    """The module that the training loop trains.

    Args:
        teacher: The decoder to convert.
        is_trained: Whether it comes trained. It is then constant, and not part of the checkpoints.
        specs: Names of the methods.
        rank: Rank of the adaptation; None for none.
        make: Returns a new network with a method, to train from scratch; None for no such networks.
    """

    def __init__(
        self, teacher: Decoder, is_trained: bool, specs: Sequence[str], rank: int | None,
        make: Callable[[Any], Transformer] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stage: Stage | None = None
        # Decoders are not modules, so the loop does not see what they share.
        self.teacher = teacher
        self.network = None if is_trained else teacher.network
        self.students = {spec: self._student(spec, rank) for spec in specs}
        self.learned = nn.ModuleList(student.learned for student in self.students.values())
        self.adapters = nn.ModuleList(
            nn.ParameterDict({name.replace(".", "-"): each for name, each in student.adapters.items()})
            for student in self.students.values()
        )
        self.scratch = nn.ModuleList() if make is None else nn.ModuleList(make(parse_method(spec)) for spec in specs)
        self.from_scratch = {spec: WordDecoder(network) for spec, network in zip(specs, self.scratch, strict=False)}

    def _student(self, spec: str, rank: int | None) -> Student:
        made = LearnedMethods(spec, self.teacher.shape)
        decoder = self.teacher.converted(made.methods)
        return Student(made, decoder, {} if rank is None else decoder.adapt(rank))

    def train(self, mode: bool = True) -> "Conversion":
        """Set the mode; the teacher of the later stages, and what is converted, have no dropout."""
        super().train(mode)
        if self.stage != "exact":
            self.teacher.network.eval()
        return self

    def _apply(self, function: Any, recurse: bool = True) -> "Conversion":
        """Move the decoders that are not submodules too."""
        for decoder in (self.teacher, *(student.decoder for student in self.students.values())):
            decoder.network._apply(function)
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all that is trained in this stage."""
        losses = [cross_entropy(decoder, tokens, targets) for decoder in self.from_scratch.values()]
        match self.stage:
            case "exact":
                losses.append(cross_entropy(self.teacher, tokens, targets))
            case "transfer":
                layers = self.teacher.layers(tokens)
                with torch.enable_grad():
                    losses += [transfer_loss(student.learned, layers) for student in self.students.values()
                               if len(student.learned.maps)]  # fmt: skip
            case "adapt":
                losses += [cross_entropy(student.decoder, tokens, targets) for student in self.students.values()]
        return torch.stack(losses).sum()


def transfer_loss(made: LearnedMethods, layers: Sequence[Layer]) -> Tensor:
    """Return the squared relative error of the outputs, averaged over layers and texts."""
    losses = []
    for (query, key, value, exact, scale, _), method in zip(layers, made.methods, strict=True):
        found = subquad.attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True, method=method)
        wrong, whole = (x.square().sum((1, 2, 3)) for x in (found - exact, exact))  # (b,)
        losses.append((wrong / whole).mean())  # of each text alone, so that processes can share the texts
    return torch.stack(losses).mean()


def cross_entropy(decoder: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(decoder.logits(tokens).flatten(0, 1), targets.flatten())
