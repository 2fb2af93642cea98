"""Measure recall and perplexity of a trained decoder whose layers all use another attention rule.

    python benchmarks/recall.py [--model PATH] [--text FILE ...] [--lengths 4096,8192] [--quick]

Perplexity of plain text hides the loss of distant attention, because most tokens depend only on recent ones. Therefore
the inputs include some whose end can be predicted only from distant tokens (`recall_inputs.py`). Nothing is trained,
and nothing is downloaded. The rules (`attention_rules.py`) are exact attention, `Multipole`, and others at the same
cost. At the largest length, `Multipole` is also measured with other values of `top`: perplexity and recall by cost.

A full run makes about 250 passes over 2,048 to 8,192 tokens; expect hours. `--quick` takes a minute or two, with a
smaller `Multipole` whose budget is below the length.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import recall_page
import results
from attention_rules import EXACT, by_method, rules
from decoder import Attend, load, missing_package, texts
from recall_curve import curve, draw
from recall_inputs import TASKS, Sample, copying, question_pair, repeated
from recall_scores import RecallScore, TextScore, check_output_layer, last_states, score_samples, score_text
from torch import Tensor, nn

import subquad
from subquad import Multipole

Samples = tuple[int, list[tuple[Sample, Sample | None]]]  # a length, and the samples of one task with their twins


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how much of it.

    Attributes:
        method: Multipole, whose cost is the budget of the other rules.
        lengths: Lengths of plain and repeated texts; the last one is that of the curve.
        copy_lengths: Lengths of the inputs with copied random tokens.
        task_length: Length of the generated tasks.
        tasks: Names of generated tasks.
        samples: Samples of each of them.
        repeated_texts: Texts that are repeated.
        tops: Values of `Multipole.top` on the curve.
        rules: Parts of the names of the rules that are compared with exact attention and `method`; all if empty.
        seed: Determines random tokens and tasks.
    """

    method: Multipole = field(default_factory=Multipole)
    lengths: tuple[int, ...] = (4096, 8192)
    copy_lengths: tuple[int, ...] = (2048, 4096, 8192)
    task_length: int = 4096
    tasks: tuple[str, ...] = tuple(TASKS)
    samples: int = 3
    repeated_texts: int = 2
    tops: tuple[int, ...] = (8, 16, 32, 64, 128)
    rules: tuple[str, ...] = ()
    seed: int = 0

    @property
    def longest(self) -> int:
        return max(*self.lengths, *self.copy_lengths, self.task_length)

    @property
    def settings(self) -> list[Multipole]:
        """The settings on the curve, the method itself among them."""
        return [self.method, *(replace(self.method, top=top) for top in self.tops if top != self.method.top)]

    @property
    def chosen_rules(self) -> dict[str, Attend]:
        """The rules that are compared, by name."""
        always, wanted = (EXACT, self.method.label), self.rules or ("",)
        return {
            name: rule
            for name, rule in rules(self.method).items()
            if name in always or any(part in name for part in wanted)
        }

    def rules_at(self, length: int) -> dict[str, Attend]:
        """Return the rules for texts of a length, with those of the curve at the last one."""
        found = self.chosen_rules
        if length == self.lengths[-1]:
            found |= {each.label: by_method(each) for each in self.settings[1:]}
        return found


QUICK = Sizes(Multipole(window=32, top=4), (384,), (384,), 384, ("needle", "word count"), 1, 1, (8,))


def read_texts(tokenizer: Callable[..., Any], length: int, paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return texts with at least `length` tokens, cut to it: those of `decoder.texts`, and files by name."""
    found = texts(tokenizer, length)
    for path in paths:
        tokens = tokenizer(path.read_text(), return_tensors="pt").input_ids[:, :length]
        if tokens.shape[1] == length:
            found[path.name] = tokens
        else:
            print(f"{path}: {tokens.shape[1]:,} tokens, left out at a length of {length:,}", flush=True)
    return found


def measure_texts(model: nn.Module, sizes: Sizes, length: int, found: dict[str, Tensor]) -> list[TextScore]:
    """Return the scores of all texts by all rules."""
    scores = []
    for text, tokens in found.items():
        states = {}
        for name, rule in sizes.rules_at(length).items():
            print(f"{text}, {length:,} tokens: {name}", flush=True)
            states[name] = last_states(model, tokens, rule)
        scores += score_text(model, text, tokens, states)
        print(recall_page.progress(scores[-len(states) :]), flush=True)
    return scores


def make_samples(tokenizer: Callable[..., Any], sizes: Sizes, found: dict[str, Tensor]) -> list[Samples]:
    """Return repeated texts, copied tokens and generated tasks; the facts of the tasks lie in the first text."""
    filler, chosen = next(iter(found.values())), list(found.values())[: sizes.repeated_texts]
    special = set(tokenizer.all_special_ids)
    vocabulary = [token for token in range(len(tokenizer)) if token not in special]
    seeds = range(sizes.seed, sizes.seed + sizes.samples)
    return [
        *((length, [(repeated(text, length), None) for text in chosen]) for length in sizes.lengths),
        *((length, [(copying(filler, length, vocabulary, sizes.seed), None)]) for length in sizes.copy_lengths),
        *(
            (sizes.task_length, [question_pair(task, tokenizer, filler, sizes.task_length, seed) for seed in seeds])
            for task in sizes.tasks
        ),
    ]


def measure_recall(model: nn.Module, sizes: Sizes, inputs: list[Samples]) -> list[RecallScore]:
    """Return the scores of all samples by all rules."""
    scores = []
    for length, samples in inputs:
        task = samples[0][0].task
        chosen = sizes.rules_at(length) if task == "repeated" else sizes.chosen_rules
        print(f"{task}, {length:,} tokens, samples: {len(samples)}", flush=True)
        scores += (of_task := score_samples(model, length, samples, chosen))
        print(recall_page.progress(of_task), flush=True)
    return scores


def page(model: nn.Module, sizes: Sizes, scores: list[TextScore], recalls: list[RecallScore]) -> tuple[str, bytes]:
    """Return the page and its picture."""
    points = curve(sizes.settings, sizes.lengths[-1], scores, recalls)
    names, config = list(sizes.chosen_rules), model.config
    limit = getattr(config, "max_position_embeddings", None)
    parts = [
        f"# recall, {results.today()}",
        f"{results.machine()}, transformers {version('transformers')}, {subquad.native.status()}",
        f"{type(model).__name__}, {config.num_hidden_layers} layers, float32, trained on up to {limit or 'unknown'} "
        f"tokens. Seed {sizes.seed}; samples of each generated task: {sizes.samples}.",
        recall_page.UNITS.format(method=sizes.method),
        *recall_page.perplexity_tables(scores, names),
        *recall_page.recall_tables(recalls, names),
        *recall_page.curve_section(points, f"recall_{results.today()}.svg"),
    ]
    return "\n\n".join(parts) + "\n", draw(points)


def numbers(argument: str) -> tuple[int, ...]:
    """Return the integers of a comma-separated list in ascending order."""
    return tuple(sorted({int(part) for part in argument.split(",")}))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Sizes]:
    """Return the options, and the sizes that they describe."""
    parser = argparse.ArgumentParser(description="Measure recall and quality; write benchmarks/results/recall_DATE.*.")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="transformers folder or GGUF file (default: SmolLM2)"
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[], metavar="FILE", help="further texts")
    parser.add_argument("--texts", metavar="NAMES", help="use only these texts, comma-separated")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.lengths[0]} tokens, one text and two tasks")
    parser.add_argument(
        "--rules", default="", metavar="NAMES",
        help='compare only rules whose names contain one of these, comma-separated, such as "window,oracle"; "none":'
        "exact attention and Multipole only",
    )  # fmt: skip
    described = {
        "lengths": "tokens of plain and repeated texts; the curve is drawn at the last one",
        "copy_lengths": "total tokens around copied random tokens",
        "task_length": "tokens of generated tasks",
        "samples": "samples of each generated task",
        "repeated_texts": "texts that are repeated",
        "tops": "values of Multipole's `top` on the curve",
        "seed": "determines random tokens and tasks",
    }
    for name, meaning in described.items():
        default = getattr(Sizes, name)
        kind, shown = (int, default) if isinstance(default, int) else (numbers, ",".join(map(str, default)))
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{meaning} ({shown})")
    options = parser.parse_args(arguments)
    for path in (*options.text, *([options.model] if options.model else [])):
        if not path.exists():
            parser.error(f"{path} does not exist")
    if options.quick:
        return options, QUICK
    wanted = tuple(part for part in options.rules.split(",") if part)
    return options, Sizes(**{name: getattr(options, name) for name in described}, rules=wanted)


def choose_texts(tokenizer: Callable[..., Any], length: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the texts that the options name; exit with code 2 if one does not exist or none is long enough."""
    found = read_texts(tokenizer, length, options.text)
    names = list(found) if options.texts is None else options.texts.split(",")
    if not names or not found.keys() >= set(names):
        fail(f"--texts: expected some of {', '.join(found) or 'no text'} at {length:,} tokens, got {options.texts}")
    return {name: found[name] for name in (names[:1] if options.quick else names)}


def fail(message: str) -> NoReturn:
    """Print one line and exit with code 2."""
    print(f"recall.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    options, sizes = parse(arguments)
    if missing := missing_package(options.model):
        fail(missing)
    model, tokenizer = load(options.model)
    found = {length: choose_texts(tokenizer, length, options) for length in {*sizes.lengths, sizes.longest}}
    try:  # before hours of measurements
        check_output_layer(model)
        inputs = make_samples(tokenizer, sizes, found[sizes.longest])
    except ValueError as error:
        fail(str(error))
    scores = [score for length in sizes.lengths for score in measure_texts(model, sizes, length, found[length])]
    recalls = measure_recall(model, sizes, inputs)
    text, picture = page(model, sizes, scores, recalls)
    rows = [{"table": type(row).__name__, **asdict(row)} for row in (*scores, *recalls)]
    results.write_page("recall", text, rows)
    (results.FOLDER / f"recall_{results.today()}.svg").write_bytes(picture)


if __name__ == "__main__":
    main()
