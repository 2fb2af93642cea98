"""The `subquad` command: one function per subcommand.

A function's parameters are its options, its docstring is the help. What a subcommand needs is imported inside
its function, so that `subquad --help` does not wait for torch.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from subquad_lab import RunError, UsageError
from subquad_lab.training.interruption import Interrupted


def demo(out: str = "demo") -> None:
    """Run the whole lab in a few minutes: a plan for this machine, the theory, four small models, and a report.

    After an interruption, run the same command to resume; delete the folder to start again.

    Args:
        out: Folder to write into.
    """
    from subquad_lab.commands import demo

    demo.run(out)


def plan(
    *,
    length: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    max_error: float | None = None,
    logit_range: float | None = None,
    sample: str | None = None,
    model: str | None = None,
    text: str | None = None,
    tokens: int | None = None,
    key_length: int | None = None,
    value_dim: int | None = None,
    key_heads: int | None = None,
    batch: int | None = None,
    causal: bool = True,
    training: bool = False,
    purpose: str = "swap",
    dtype: str = "float32",
    all: bool = False,
) -> None:
    """Choose the quickest method for a shape and an error, and say why.

    Times are predicted for this machine, which is measured the first time: at most half a minute, kept in the cache
    folder.

    Args:
        length: Number of queries; needed without a sample, as is head-dim. Sizes that are not given are the sample's.
        heads: Number of query heads; 1 without a sample.
        head_dim: Width of a head.
        max_error: Relative error, |out - exact| / |exact|, that is allowed; 0.05 if not given.
        logit_range: How far the scaled logits reach to either side of 0: errors are predicted from it.
        sample: A safetensors file with query, key and value (or q, k, v), each (..., heads, length, width):
            errors are measured on it.
        model: A folder that transformers saved, or a .gguf file: plan for each layer of that language model (the extra
            `pretrained`). Beside it go text, tokens, max-error and all; it has sizes of its own.
        text: A text for the model to read: errors are measured on it.
        tokens: How many of its tokens are read; as many as there are and the model reads, up to 4096, if not given.
        key_length: Number of keys, if it is not that of the queries.
        value_dim: Width of the values, if it is not head-dim.
        key_heads: Number of key heads, if query heads share them.
        batch: Number of sequences; 1 without a sample.
        causal: Whether a query sees only the keys up to its own place.
        training: Whether the backward counts too; with the purpose train it always does.
        purpose: swap, to replace exact attention in a model that has it; or train, for a model that is trained from
            scratch: then no error counts, and the table tells sizes of states and what a layer can recall.
        dtype: float32, float64, bfloat16 or float16.
        all: Show every candidate, not just those that compete; of a model, also every head.
    """
    sizes = dict(query_length=length, key_length=key_length, head_dim=head_dim, value_dim=value_dim, heads=heads,
                 key_heads=key_heads, batch=batch)  # fmt: skip
    if model is not None or text is not None or tokens is not None:
        from subquad_lab.commands import plan_model

        others = [*sizes.values(), logit_range, sample]
        rest = causal, training, purpose, dtype
        if any(other is not None for other in others) or rest != (True, False, "swap", "float32"):
            raise UsageError("--model: goes with --text, --tokens, --max-error and --all; others are the model's own")
        plan_model.run(model, text, tokens, max_error, all)
        return
    from subquad_lab.commands import plan

    plan.run(plan.Question(sizes, max_error, logit_range, sample, causal, training, purpose, dtype), all)


def bench(
    methods: str = "taylor:2,random:256,linear:elu,separable",
    lengths: str = "1024,4096,16384",
    heads: int = 8,
    head_dim: int = 64,
    causal: bool = True,
    backward: bool = False,
    out: str | None = None,
) -> None:
    """Time methods against torch's own attention, and against the peak of matrix products.

    Args:
        methods: What to time, with commas between: taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable,
            window:SIZE, multipole:TOP, exact.
        lengths: Sequence lengths, with commas between.
        heads: Number of heads.
        head_dim: Width of a head.
        causal: Whether a query sees only the keys up to its own place.
        backward: Whether gradients are computed too.
        out: Folder for bench.json and bench.svg; made if it is missing.
    """
    from subquad_lab.commands import bench

    _check_folder("--out", out)
    bench.run(methods, lengths, heads, head_dim, causal, backward, out)


def train(experiment: Any, config: Any, out: str, resume: str | None) -> None:
    """Train a model: a new run, or --resume RUN to resume one that was stopped.

    A run's folder holds its config, figures, checkpoints, result and curves. Ctrl-C finishes the step and saves.
    """
    from subquad_lab.commands import train

    train.run(experiment, config, out, resume)


def compare(experiment: Any, config: Any, out: str) -> None:
    """Train all variants of an experiment with the same data, budget and seeds: one table, one plot.

    After an interruption, run the same command with the same --out to resume.
    """
    from subquad_lab.commands import compare

    compare.run(_given(experiment), config, Path(out))


def sweep(experiment: Any, config: Any, out: str, grid: Any, span: Any, trials: int = 20) -> None:
    """Train with many values of some fields, and say which are best.

    --grid.FIELD A,B,C tries each value with each of other fields; --span.FIELD LOW,HIGH searches between, on a
    logarithmic scale where both are above 0. Several processes with the same --out share the trials; run again, it goes
    on where it was.
    """
    from subquad_lab.commands import sweep

    sweep.run(_given(experiment), config, Path(out), trials, grid, span)


def _given(experiment: Any) -> Any:
    if experiment is None:
        raise UsageError("EXPERIMENT: expected an experiment, found none")
    return experiment


def evaluate(run: str, part: Literal["valid", "test"] = "test") -> None:
    """Figures of a run's weights on a part of its data; of a series, those of its best run.

    Args:
        run: Folder of the run.
        part: valid or test.
    """
    from subquad_lab.commands import evaluate

    evaluate.run(run, part)


def runs(root: str = "runs") -> None:
    """List the runs that there are.

    Args:
        root: Folder to look into, with all folders in it.
    """
    from subquad_lab.commands import runs

    runs.run(Path(root))


def report(
    runs: list[str] = [],  # noqa: B006
    out: str = "report.html",
    root: str = "runs",
    theory: str | None = None,
) -> None:
    """Write one page about runs: tables, curves, and published figures beside ours.

    Args:
        runs: Folders of runs, also of series, comparisons and sweeps; all runs in root if none is given.
        out: The page; one file that needs no other.
        root: Folder to look into.
        theory: What `subquad verify --json` has printed, to be shown as well.
    """
    from subquad_lab.commands import report

    report.run([Path(run) for run in runs], Path(root), Path(out), None if theory is None else Path(theory))


def sample(
    run: str,
    prompt: str = "the",
    count: int = 5,
    words: int = 60,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> None:
    """Continue a text with a trained language model.

    Args:
        run: Folder of the run.
        prompt: How each text begins.
        count: Number of texts.
        words: The most words that are added to each; one ends with its sentence.
        temperature: Below 1 likely words become likelier, above 1 rarer ones do; 0 takes the likeliest.
        top_k: Sample from the k most likely words only.
        top_p: Nucleus sampling: the smallest set of words with this total probability.
        seed: Of the first text; the next one has the next.
    """
    from subquad_lab.commands import sample

    sample.run(run, prompt, count, words, temperature, top_k, top_p, seed)


def predict(run: str, images: list[str]) -> None:
    """Say which class a trained image model takes each picture for, and how sure it is.

    Args:
        run: Folder of the run; for a series, its best run is used.
        images: Files of pictures.
    """
    from subquad_lab.commands import predict

    predict.run(run, images)


def transcribe(run: str, files: list[str], beams: int = 4) -> None:
    """Write down what a trained speech model hears in sound files, utterance by utterance.

    Neither the volume nor silence around the words matters.

    Args:
        run: Folder of the run; of a series, its best run hears.
        files: Sound files: wav, flac and others, of any rate.
        beams: Texts that are followed at once; 1 is quickest.
    """
    from subquad_lab.commands import transcribe

    transcribe.run(run, files, beams)


def synthesize(metadata: str, out: str, voices: str = "en-us", clips: int | None = None) -> None:
    """Make a folder like LJSpeech's from transcripts, spoken by espeak-ng (the extra `speech`).

    After an interruption, run the same command with the same OUT to resume.

    Args:
        metadata: A file with lines of id|text or id|text|normalised text.
        out: Folder for metadata.csv and wavs/.
        voices: Of espeak-ng, with commas between; each clip draws one.
        clips: The first so many lines; all if not given.
    """
    from subquad_lab.commands import synthesize

    synthesize.run(metadata, out, voices, clips)


def verify(
    claims: list[str] = [],  # noqa: B006
    json: bool = False,
    plots: str | None = None,
    seed: int = 0,
    explain: bool = False,
) -> None:
    """Check the theory: each claim with its figure and its verdict. Exit code 1 if one fails.

    Args:
        claims: Numbers, or subjects: attention, recurrence, optimizers, networks; all if none is given.
        json: Print all figures as JSON.
        plots: Folder for the pictures, as SVG; made if it is missing.
        seed: Where the random numbers begin.
        explain: Print the derivation of each, with the numbers of this run.
    """
    from subquad_lab.commands import verify

    _check_folder("--plots", plots)
    verify.run(claims, json, plots, seed, explain)


def env(json: bool = False) -> None:
    """Print versions, kernels, threads and calibration: what a bug report needs.

    Nothing is measured or written. Example: subquad env --json

    Args:
        json: Print JSON instead of text.
    """
    from subquad_lab.commands import env

    env.run(json)


def cache(clear: bool = False) -> None:
    """Show the files in the cache folder with their sizes and ages, or empty it.

    It holds calibrations of this machine, features of sounds and converted graphs; all of them can be made again. Above
    a size limit, features that have not been used for the longest time are removed. Example: subquad cache --clear

    Args:
        clear: Remove the files.
    """
    from subquad_lab.commands import cache

    cache.run(clear)


def _check_folder(option: str, folder: str | None) -> None:
    """No name, as of a shell variable that is not set, would be the current folder."""
    if folder == "":
        raise UsageError(f"{option}: expected a folder, found ''")


COMMANDS = (
    demo, plan, bench, verify, train, evaluate, compare, sweep, runs, sample, predict, transcribe, synthesize, report,
    env, cache,
)  # fmt: skip
OF_EXPERIMENTS = {"train": "runs", "compare": "compare", "sweep": "sweep"}  # and the folders that they write into


def _experiments() -> Any:
    """Imported for the commands that need them."""
    from subquad_lab.experiments import EXPERIMENTS

    return EXPERIMENTS


def complain(message: object) -> None:
    """Print one line; the parser's own messages can have several."""
    print("subquad: error:", " ".join(str(message).split()), file=sys.stderr)


def _how_to_install(error: ModuleNotFoundError) -> str:
    return (
        f"{error.name} is missing: the library is installed, the lab with its commands is not. In a checkout of "
        "subquad: pip install -c constraints.txt '.[lab]'"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a run that fails, 2 for bad usage, 130 and 143 for signals."""
    from argparse import ArgumentError

    try:
        from subquad_lab.options.fields import wrong_value
        from subquad_lab.options.parsing import call
    except ModuleNotFoundError as error:
        complain(_how_to_install(error))
        return 1
    given = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: print(f"subquad: warning: {message}", file=sys.stderr)
    try:
        try:
            call(COMMANDS, OF_EXPERIMENTS, given, _experiments)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is still caught
    except ArgumentError as error:
        complain(wrong_value(error))
        return 2
    except UsageError as error:
        complain(error)
        return 2
    except RunError as error:
        complain(error)
        return 1
    except Interrupted as error:
        is_run = given[:1] == ["train"]
        again = f"subquad train --resume {error.folder}" if is_run else "the same command once more"
        what = "the run" if is_run else "what is done"
        print(f"subquad: {error}; {what} is saved, and goes on with: {again}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        complain(_how_to_install(error))
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("subquad: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # such as a full disk behind the standard output
        complain(f"{error.filename or 'output'}: {error.strerror}")
        return 1
    return 0
