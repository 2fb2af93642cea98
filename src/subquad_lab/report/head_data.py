"""The heads of a pretrained model that the page explores, as `tools/page_heads.py` stored them.

    heads.json    where they come from, the tokens of the text, and what each head is
    heads.bin     for each head its queries, keys and values: 8 bits per number, then one float32 scale per token

    number = float32(integer * scale)

Axes: n tokens, d width.
"""

import base64
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import subquad
from subquad.methods import label_of

DATA = Path(__file__).parent / "data"
STORY, ABOUT, BINARY = DATA / "story.txt", DATA / "heads.json", DATA / "heads.bin"
LARGEST = 700_000  # bytes of heads.bin
MOST_FEATURES = 256  # rows of projections in the page; fewer features use the first rows
FAR = 64  # tokens: the page begins with the query that looks farther back than this with the largest weight
MAKERS: dict[str, Callable[..., Any]] = {
    "exact": subquad.Exact,
    "multipole": subquad.Multipole,
    "window": subquad.Window,
    "taylor": subquad.Taylor,
    "random": lambda features: subquad.RandomFeatures(features),
    "elu": lambda: subquad.Linear("elu"),
    "separable": subquad.Separable,
}
# With which the page begins.
SETTINGS: dict[str, dict[str, int]] = {
    "exact": {}, "multipole": asdict(subquad.Multipole()), "window": {"size": 64, "sinks": 4}, "taylor": {"degree": 2},
    "random": {"features": MOST_FEATURES}, "elu": {}, "separable": {},
}  # fmt: skip


class Head(NamedTuple):
    """A head of a pretrained model on the text of the page; `measure` is the figure by which its kind was chosen."""

    kind: str
    layer: int
    head: int
    measure: float
    query: Tensor  # (n, d), RoPE applied
    key: Tensor
    value: Tensor


def stored(x: Tensor) -> bytes:
    """Return a tensor (n, d) as bytes."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    integers = (x / scale.clamp(min=1e-30)).round().to(torch.int8)
    return integers.numpy().tobytes() + scale.numpy().astype("<f4").tobytes()


def unstored(content: bytes, n: int, width: int, heads: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield query, key and value (n, d), float32, of each head."""
    sizes = [n * width, 4 * n] * 3 * heads
    if len(content) != sum(sizes):
        raise ValueError(f"{BINARY.name}: expected {sum(sizes):,} bytes, got {len(content):,}")
    parts = iter(torch.frombuffer(bytearray(content), dtype=torch.int8).split(sizes))
    for _ in range(heads):
        tensors = [next(parts).reshape(n, width).float() * next(parts).view(torch.float32)[:, None] for _ in range(3)]
        yield tensors[0], tensors[1], tensors[2]


def heads() -> tuple[dict[str, Any], list[Head]]:
    """Return what heads.json says, and the heads."""
    about = json.loads(ABOUT.read_text())
    tensors = unstored(BINARY.read_bytes(), len(about["tokens"]), about["width"], len(about["heads"]))
    found = [
        Head(own["kind"], own["layer"], own["head"], own["measure"], *x)
        for own, x in zip(about["heads"], tensors, strict=True)
    ]
    return about, found


def errors(head: Head) -> dict[str, float]:
    """Return |out - exact| / |exact| of the head for each method, as the library computes it."""
    q, k, v = (x[None, None] for x in head[-3:])
    with warnings.catch_warnings(action="ignore"):  # The errors are the point.
        methods = {name: MAKERS[name](**own) for name, own in SETTINGS.items()}
        outputs = {name: subquad.attention(q, k, v, is_causal=True, method=own) for name, own in methods.items()}
    exact = outputs["exact"]
    return {name: float((output - exact).norm() / exact.norm()) for name, output in outputs.items()}


def farthest_look(head: Head) -> int:
    """Return the row with the largest weight on one key more than FAR tokens before it, the first keys left out."""
    n, width = head.query.shape
    weights = (head.query @ head.key.mT / width**0.5).masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf).softmax(-1)
    weights[:, : SETTINGS["window"]["sinks"]] = 0
    return int(weights.tril(-FAR).amax(1).argmax())


def head_data() -> dict[str, Any]:
    """Return what the part `head` of the page needs: the stored heads, the projections, and a table of errors."""
    about, found = heads()
    projections = subquad.RandomFeatures(MOST_FEATURES).draw(about["width"]).float()
    shown = [{**own, "errors": errors(head)} for own, head in zip(about["heads"], found, strict=True)]
    methods = {name: {"label": label_of(MAKERS[name](**own)), "settings": own} for name, own in SETTINGS.items()}
    start = next(i for i, head in enumerate(found) if head.kind == "induction")
    return {
        **about, "heads": shown, "methods": methods, "start": {"head": start, "row": farthest_look(found[start])},
        "tensors": _base64(BINARY.read_bytes()), "projections": _base64(projections.numpy().astype("<f4").tobytes()),
    }  # fmt: skip


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
