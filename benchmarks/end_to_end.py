"""Time a whole model, prefill and time per token, with exact attention, with Multipole, and in llama.cpp.

    python benchmarks/end_to_end.py [--model PATH] [--lengths 512,2048,4096,8192,16384] [--longest] [--loops] [--quick]

All contestants (`contestants.py`) run in one process and take turns: in each round every contestant reads the context
once, then every contestant reads one token in turn, so that other load on the machine affects all of them. The tokens
after the context are those of the text, so that all contestants do the same work. A short pause before each turn lets
the threads of the contestant before it go to sleep.

    prefill         median over the rounds; logits of the last position only
    token           median over the tokens after the context, and the slowest one as a multiple of the median
    same token      share of these tokens after which the most likely next token is that of exact attention

With `--loops` it compares two ways to decode instead, for exact attention, Taylor(2) and Multipole: `generate`, and the
usual loop in user code. Both choose the most likely token; each is timed once per round, in turn.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import results
from contestants import Contestant, LlamaCpp, Transformers, Ways
from decoder import load, manual, missing_package, weights_file
from torch import Tensor

import subquad

EXACT = "transformers, exact"
LENGTHS, MAX_LENGTH = (512, 2048, 4096, 8192, 16_384), 32_768  # tokens
PAUSE_SECONDS = 0.05
WARM_UP = 16  # tokens
MIN_TOKENS = 3  # that are timed after a context, however slow


@dataclass(frozen=True)
class Effort:
    """How often each contestant is measured at a length.

    Attributes:
        rounds: Times that the context is read.
        tokens: Tokens read after it.
        prefill_seconds: No round starts after this time, except the first.
        token_seconds: Time limit of a contestant for single tokens.
    """

    rounds: int = 3
    tokens: int = 48
    prefill_seconds: float = 300.0
    token_seconds: float = 60.0


@dataclass(frozen=True)
class Row:
    """One contestant at one length. Ratios are the times of `EXACT` divided by those of the contestant."""

    length: int
    contestant: str
    prefill_seconds: float
    rounds: int
    prefill_ratio: float
    token_ms: float
    token_ratio: float
    worst_over_median: float
    tokens: int
    same_token: float


def timed(call: Callable[[], int]) -> tuple[float, int]:
    """Return the seconds of a call after a short pause, and its result."""
    time.sleep(PAUSE_SECONDS)
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def rotated(contestants: Sequence[Contestant], turn: int) -> list[Contestant]:
    """Return all contestants, beginning with a different one at each turn."""
    first = turn % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def time_prefill(contestants: Sequence[Contestant], context: Tensor, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds of each round by contestant. Each holds the context afterwards."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    begin = time.perf_counter()
    for turn in range(effort.rounds):
        if turn and time.perf_counter() - begin > effort.prefill_seconds:
            break
        for each in rotated(contestants, turn):
            spent, _ = timed(lambda each=each: each.prefill(context))
            seconds[each.name].append(spent)
            print(f"{context.shape[1]:,} tokens, {each.name}: prefill {spent:.2f} s", flush=True)
    return seconds


def time_tokens(
    contestants: Sequence[Contestant], tokens: Sequence[int], effort: Effort
) -> dict[str, list[tuple[float, int]]]:
    """Return the seconds of each token by contestant, with the most likely token after it."""
    found: dict[str, list[tuple[float, int]]] = {each.name: [] for each in contestants}
    for turn, token in enumerate(tokens):
        for each in rotated(contestants, turn):
            spent = sum(seconds for seconds, _ in found[each.name])
            if turn < MIN_TOKENS or spent < effort.token_seconds:
                found[each.name].append(timed(lambda each=each, token=token: each.step(token)))
    return found


def measure(contestants: Sequence[Contestant], text: Tensor, length: int, effort: Effort) -> list[Row]:
    """Return a row for each contestant, exact attention among them."""
    prefill = time_prefill(contestants, text[:, :length], effort)
    steps = time_tokens(contestants, text[0, length : length + effort.tokens].tolist(), effort)
    rows = []
    for name in prefill:
        seconds = [spent for spent, _ in steps[name]]
        same = [a == b for (_, a), (_, b) in zip(steps[name], steps[EXACT], strict=False)]
        token = median(seconds)
        rows.append(Row(
            length, name, median(prefill[name]), len(prefill[name]), median(prefill[EXACT]) / median(prefill[name]),
            1e3 * token, median(spent for spent, _ in steps[EXACT]) / token, max(seconds) / token, len(seconds),
            fmean(same),
        ))  # fmt: skip
        print(f"{length:,} tokens, {name}: {1e3 * token:.1f} ms per token", flush=True)
    for each in contestants:
        each.forget()
    return rows


def contestants_for(model: Any, path: Path | None, positions: int) -> tuple[list[Contestant], str]:
    """Return the contestants, and a sentence on llama.cpp."""
    found: list[Contestant] = [
        Transformers(EXACT, model),
        Transformers("transformers, multipole, state cache", model, "multipole"),
        Transformers("transformers, multipole, usual loop", model, "multipole", passes_cache=False),
    ]
    if path is None:
        return found, "llama.cpp was not measured: it needs a GGUF file."
    try:
        installed = version("llama-cpp-python")
    except PackageNotFoundError:
        return found, (
            "llama.cpp was not measured: it needs `pip install --no-deps llama-cpp-python diskcache jinja2`."
        )
    found.append(LlamaCpp(path, positions))
    return found, (
        f"llama.cpp (llama-cpp-python {installed}) reads {path.name} as it is, its weights quantized, with flash "
        "attention; transformers computes in float32."
    )


@dataclass(frozen=True)
class WayRow:
    """One method at one length: medians of the time per token, of all rounds."""

    length: int
    method: str
    generate_ms: float
    loop_ms: float


def measure_ways(ways: Sequence[Ways], text: Tensor, length: int, effort: Effort) -> list[WayRow]:
    """Return a row for each method."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(effort.rounds):
        for each in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
            for name, way in (("generate", each.generate), ("loop", each.loop)):
                seconds.setdefault((each.name, name), []).extend(way(text[:, :length], effort.tokens))
    rows = []
    for each in ways:
        generate, loop = (1e3 * median(seconds[each.name, name]) for name in ("generate", "loop"))
        rows.append(WayRow(length, each.name, generate, loop))
        print(f"{length:,} tokens, {each.name}: generate {generate:.1f} ms, loop {loop:.1f} ms per token", flush=True)
    return rows


def ways_page(model: Any, rows: Sequence[WayRow], load_before: str) -> str:
    """Return the whole page of `--loops`."""
    exact = {row.length: row.generate_ms for row in rows if row.method == EXACT}
    lines = ["| tokens before | method | `generate` | against exact | loop | against `generate` |",
             "|---:|---|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        lines.append(f"| {row.length:,} | {row.method} | {row.generate_ms:.1f} ms | "
                     f"{row.generate_ms / exact[row.length]:.2f} | {row.loop_ms:.1f} ms | "
                     f"{row.loop_ms / row.generate_ms:.2f} |")  # fmt: skip
    return "\n\n".join([
        f"# ways to decode, {results.today()}",
        f"{results.machine()}, transformers {version('transformers')}, {subquad.native.status()}. Load average of 1, 5 "
        f"and 15 minutes: {load_before} before, {load_average()} after.",
        f"{type(model).__name__}: time per token after a context, medians. *Loop* is `out = model(ids, "
        "use_cache=True)`, then `model(next, past_key_values=out.past_key_values)`.",
        "\n".join(lines),
    ]) + "\n"  # fmt: skip


def warm_up(contestants: Sequence[Contestant], text: Tensor) -> None:
    """Let each contestant load and allocate what it needs once."""
    for each in contestants:
        each.prefill(text[:, :WARM_UP])
        each.step(int(text[0, WARM_UP]))
        each.forget()


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    titles = ["tokens before", "contestant", "prefill", "times as fast", "rounds", "one token", "times as fast",
              "worst / median", "tokens", "same token"]  # fmt: skip
    lines = [titles, ["---:", "---", *["---:"] * 8]]
    for row in rows:
        lines.append([
            f"{row.length:,}", row.contestant, f"{row.prefill_seconds:.2f} s", f"{row.prefill_ratio:.2f}x",
            str(row.rounds), f"{row.token_ms:.1f} ms", f"{row.token_ratio:.2f}x", f"{row.worst_over_median:.1f}",
            str(row.tokens), f"{row.same_token:.0%}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(model: Any, rows: Sequence[Row], note: str, load_before: str) -> str:
    """Return the whole page."""
    limit = getattr(model.config, "max_position_embeddings", None)
    parts = [
        f"# end to end, {results.today()}",
        f"{results.machine()}, transformers {version('transformers')}, {subquad.native.status()}. Load average of 1, 5 "
        f"and 15 minutes: {load_before} before, {load_average()} after.",
        f"{type(model).__name__}, {model.config.num_hidden_layers} layers, all with the same attention. Contestants "
        f"take turns. *Times as fast* is against `{EXACT}`. Prefill computes the logits of the last position only. "
        "*Worst / median* is the slowest token against the median one; *same token* is the share of tokens after "
        "which the most likely next token is that of exact attention.",
        "*State cache* passes `state_cache(model)` to the first call. *Usual loop* is `out = model(ids, "
        "use_cache=True)`, then `model(next, past_key_values=out.past_key_values)`; for exact attention both loops use "
        "the same cache.",
        note,
    ]
    if limit is not None and rows[-1].length > limit:
        parts.append(f"The model was trained on up to {limit:,} positions. Beyond them RoPE continues unchanged: the "
                     "times are valid, the text that it would generate is not.")  # fmt: skip
    return "\n\n".join([*parts, table(rows)]) + "\n"


def load_average() -> str:
    return ", ".join(f"{load:.2f}" for load in os.getloadavg())


def numbers(argument: str) -> tuple[int, ...]:
    """Return the integers of a comma-separated list."""
    return tuple(int(part) for part in argument.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a whole model; write benchmarks/results/end_to_end_DATE.*.")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="transformers folder or GGUF file (default: SmolLM2)"
    )
    shown = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, metavar="N,N", help=f"tokens ({shown})")
    parser.add_argument("--longest", action="store_true", help=f"also measure {MAX_LENGTH:,} tokens")
    parser.add_argument("--rounds", type=int, default=Effort.rounds, help="times a context is read (%(default)s)")
    parser.add_argument("--tokens", type=int, default=Effort.tokens, help="tokens after a context (%(default)s)")
    parser.add_argument("--loops", action="store_true", help="compare generate with a custom loop")
    parser.add_argument("--quick", action="store_true", help="64 tokens, one round, 4 tokens")
    options = parser.parse_args(arguments)
    if options.model is not None and not options.model.exists():
        parser.error(f"--model: {options.model} does not exist")
    if missing := missing_package(options.model):
        print(f"end_to_end.py: {missing}", file=sys.stderr)
        raise SystemExit(2)
    lengths = sorted({*options.lengths, *([MAX_LENGTH] if options.longest else [])})
    effort = Effort(options.rounds, options.tokens)
    if options.quick:
        lengths, effort = [64], Effort(1, 4)

    load_before = load_average()
    model, tokenizer = load(options.model)
    positions = lengths[-1] + effort.tokens
    text = tokenizer(manual(), return_tensors="pt").input_ids[:, :positions]
    if text.shape[1] < positions:
        parser.error(f"--lengths: expected at most the {text.shape[1]:,} tokens of the text, got {positions:,}")
    if options.loops:
        methods = {EXACT: None, "Taylor(2)": subquad.Taylor(2), "Multipole()": subquad.Multipole()}
        ways = [Ways(name, model, method) for name, method in methods.items()]
        found = [row for length in lengths for row in measure_ways(ways, text, length, effort)]
        results.write_page("ways_to_decode", ways_page(model, found, load_before), [asdict(row) for row in found])
        return
    weights = weights_file() if options.model is None else options.model if options.model.is_file() else None
    contestants, note = contestants_for(model, weights, positions)
    warm_up(contestants, text)
    rows = [row for length in lengths for row in measure(contestants, text, length, effort)]
    results.write_page("end_to_end", page(model, rows, note, load_before), [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
