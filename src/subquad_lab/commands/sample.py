"""`subquad sample`: generate text with a trained language model."""

from math import inf
from pathlib import Path

from subquad_lab import UsageError
from subquad_lab.experiments.language import Language
from subquad_lab.experiments.stored import chosen, trained
from subquad_lab.system.text import say


def run(folder: str, prompt: str, count: int, words: int, temperature: float, top_k: int | None, top_p: float | None,
        seed: int) -> None:  # fmt: skip
    """Print each text on its own line, as soon as it is generated."""
    for name, number in {"count": count, "words": words, "top-k": top_k}.items():
        if number is not None and number < 1:
            raise UsageError(f"--{name}: expected a positive integer, got {number}")
    if not 0 <= seed < 2**63 - count:
        raise UsageError(f"--seed: expected an integer >= 0, got {seed}")
    if not 0 <= temperature < inf:
        raise UsageError(f"--temperature: expected a number >= 0, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p: expected a number in (0, 1], got {top_p}")
    made, task = trained(chosen(Path(folder)))
    if not isinstance(task, Language):
        raise UsageError(f"RUN: expected a run of a language model, got {made.folder}")
    for i in range(count):
        say(task.sample(prompt, words, temperature, top_k, top_p, seed + i), flush=True)
