"""The `subquad` command: one function per subcommand.

The parameters of a function are the options of its subcommand, and its docstring is the help; a trailing underscore, as
in `all_`, is dropped from the option. Each subcommand imports what it needs inside its function, so that `subquad
--help` does not wait for torch.
"""

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from subquad_lab import RunError, UsageError
from subquad_lab.system.out_of_memory import is_out_of_memory
from subquad_lab.system.text import one_line, say, warn
from subquad_lab.training.interruption import Interrupted


def demo(out: str = "demo") -> None:
    """Run the whole lab in a few minutes: plan, theory, small models, and an HTML report.

    Rerun the same command to resume after an interruption; delete the folder to start over.

    Example: subquad demo --out demo

    Args:
        out: Output folder.
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
    all_: bool = False,
) -> None:
    """Choose the fastest attention method within an error budget, and explain the choice.

    Times are predicted for this machine, which is calibrated on first use (at most 30 s; the result is cached).

    Example: subquad plan --length 8192 --heads 8 --head-dim 64

    Args:
        length: Number of queries. Required without --sample or --model. Default: that of the sample.
        heads: Number of query heads. Default: that of the sample, or 1.
        head_dim: Head dimension. Required without --sample or --model. Default: that of the sample.
        max_error: Error budget: largest relative error |out - exact| / |exact| that is acceptable. Default: 0.05.
        logit_range: Bound R such that the scaled logits lie in [-R, R]. Errors are predicted from it.
        sample: safetensors file with tensors query, key and value (or q, k, v) of shape (..., heads, length, head_dim).
            Errors are measured on it.
        model: Folder saved by transformers, or a .gguf file: plan each layer of this language model (needs the extra
            `pretrained`). Can be combined with --text, --tokens, --max-error and --all only; the model sets the sizes.
        text: Text file that --model reads. Errors are measured on it.
        tokens: Number of tokens of --text to read. Default: all of them, up to 4096 or the model's maximum.
        key_length: Number of keys. Default: the number of queries.
        value_dim: Dimension of the values. Default: the head dimension.
        key_heads: Number of key heads, for grouped-query attention. Default: the number of query heads.
        batch: Batch size. Default: that of the sample, or 1.
        causal: Apply a causal mask.
        training: Include the backward pass in the times. Always true with --purpose train.
        purpose: swap: replace exact attention in a trained model. train: train a model from scratch; errors then do not
            matter, and the table shows state size and recall instead.
        dtype: float32, float64, bfloat16 or float16.
        all_: Show all candidates, not only the competitive ones. With --model, also show every head.
    """
    sizes = dict(query_length=length, key_length=key_length, head_dim=head_dim, value_dim=value_dim, heads=heads,
                 key_heads=key_heads, batch=batch)  # fmt: skip
    if model is not None or text is not None or tokens is not None:
        from subquad_lab.commands import plan_model

        others = [*sizes.values(), logit_range, sample]
        rest = causal, training, purpose, dtype
        if any(other is not None for other in others) or rest != (True, False, "swap", "float32"):
            raise UsageError(
                "--model: expected no other options than --text, --tokens, --max-error and --all; the model sets the "
                "rest"
            )
        plan_model.run(model, text, tokens, max_error, all_)
        return
    from subquad_lab.commands import plan

    plan.run(plan.Question(sizes, max_error, logit_range, sample, causal, training, purpose, dtype), all_)


def bench(
    methods: str = "taylor:2,random:256,linear:elu,separable",
    lengths: str = "1024,4096,16384",
    heads: int = 8,
    head_dim: int = 64,
    causal: bool = True,
    backward: bool = False,
    out: str | None = None,
) -> None:
    """Benchmark attention methods against torch's own: time, memory and error.

    Example: subquad bench --methods taylor:2,multipole --lengths 4096,16384

    Args:
        methods: Comma-separated methods: taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable, window:SIZE,
            multipole:TOP, window:SIZE+METHOD, exact.
        lengths: Comma-separated sequence lengths.
        heads: Number of heads.
        head_dim: Head dimension.
        causal: Apply a causal mask.
        backward: Include the backward pass.
        out: Folder for bench.json and bench.svg; created if missing. Default: print the table only.
    """
    from subquad_lab.commands import bench

    bench.run(methods, lengths, heads, head_dim, causal, backward, out)


def train(experiment: Any, config: Any, out: str, resume: str | None, sequence_parallel: int) -> None:
    """Train a model in a new run, or resume an interrupted one with --resume RUN.

    The run folder holds the config, metrics, checkpoints, result and learning curves. Ctrl-C finishes the current step,
    saves a checkpoint and exits.

    Example: subquad train language --preset quick
    """
    from subquad_lab.commands import train

    train.run(experiment, config, out, resume, sequence_parallel)


def compare(experiment: Any, config: Any, out: str) -> None:
    """Train all variants of an experiment on the same data, budget and seeds, and compare them.

    Rerun the same command with the same --out to resume after an interruption.

    Example: subquad compare images --epochs 2
    """
    from subquad_lab.commands import compare

    compare.run(_given(experiment), config, Path(out))


def sweep(experiment: Any, config: Any, out: str, grid: Any, span: Any, trials: int = 20) -> None:
    """Search over config fields and rank the trials by validation result.

    --grid.FIELD A,B,C tries all listed values, combined with those of other fields. --span.FIELD LOW,HIGH searches the
    range, on a logarithmic scale if LOW > 0. Several processes with the same --out share the trials. Rerun the same
    command to resume after an interruption.

    Example: subquad sweep language --grid.lr 1e-3,3e-3 --grid.width 64,128
    """
    from subquad_lab.commands import sweep

    sweep.run(_given(experiment), config, Path(out), trials, grid, span)


def _given(experiment: Any) -> Any:
    if experiment is None:
        raise UsageError("EXPERIMENT: expected an experiment, got none")
    return experiment


def evaluate(run: str, part: Literal["valid", "test"] = "test", longest: int | None = None) -> None:
    """Evaluate a trained model on the validation or test set of its run.

    Example: subquad evaluate runs/language-001

    Args:
        run: Run folder. For a series of seeds, the best run is used.
        part: valid or test.
        longest: Of a language model, print the perplexity by position in texts of this many words instead.
    """
    from subquad_lab.commands import evaluate

    evaluate.run(run, part, longest)


def runs(root: str = "runs") -> None:
    """List all runs in a folder and its subfolders.

    Example: subquad runs --root runs

    Args:
        root: Folder to search.
    """
    from subquad_lab.commands import runs

    runs.run(Path(root))


def report(
    runs: list[str] = [],  # noqa: B006
    out: str = "report.html",
    root: str = "runs",
    theory: str | None = None,
) -> None:
    """Write an HTML page about runs: main results, tables beside published results, interactive plots.

    Example: subquad report runs/language-001 --out report.html

    Args:
        runs: Run folders, including those of series, comparisons and sweeps. Default: all runs in --root.
        out: HTML file to write. It is self-contained and loads nothing.
        root: Folder to search for runs.
        theory: Output file of `subquad verify --json` to include, with the plots in the folder `theory` next to it, as
            `--plots theory` writes them.
    """
    from subquad_lab.commands import report

    if out == "":
        raise UsageError("--out: expected a file, got ''")
    report.run([Path(run) for run in runs], Path(root), Path(out), None if theory is None else Path(theory))


def serve(port: int = 8000, root: str = "runs") -> None:
    """Serve the report as a local web page that follows the runs while they train.

    It is read-only and listens on 127.0.0.1, so only this machine can open it. Stop it with Ctrl-C.

    Example: subquad serve --port 8000

    Args:
        port: Port to listen on. 0 selects a free one.
        root: Folder to search for runs.
    """
    from subquad_lab.commands import serve

    serve.run(Path(root), port)


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
    """Generate text with a trained language model.

    Example: subquad sample runs/language-001 --prompt "the list" --top-p 0.9

    Args:
        run: Run folder. For a series of seeds, the best run is used.
        prompt: Text to continue.
        count: Number of texts.
        words: Maximum number of words to generate per text. A text also ends at the end of its sentence.
        temperature: Sampling temperature. 0 always picks the most likely word.
        top_k: Sample from the k most likely words. Default: all words.
        top_p: Nucleus sampling: sample from the smallest set of words with this total probability. Default: all words.
        seed: Seed of the first text; each further text uses the next seed.
    """
    from subquad_lab.commands import sample

    sample.run(run, prompt, count, words, temperature, top_k, top_p, seed)


def predict(run: str, images: list[str]) -> None:
    """Classify image files with a trained image model.

    Example: subquad predict runs/images-001 scan.png

    Args:
        run: Run folder. For a series of seeds, the best run is used.
        images: Image files.
    """
    from subquad_lab.commands import predict

    predict.run(run, images)


def transcribe(run: str, files: list[str], beams: int = 4) -> None:
    """Transcribe audio files with a trained speech model, one line per utterance.

    The volume and the silence at both ends of each utterance are adjusted to match the training clips.

    Example: subquad transcribe runs/speech-001 recording.wav

    Args:
        run: Run folder. For a series of seeds, the best run is used.
        files: Audio files (wav, flac and others) of any sample rate.
        beams: Beam width; 1 is greedy and fastest.
    """
    from subquad_lab.commands import transcribe

    transcribe.run(run, files, beams)


def synthesize(metadata: str, out: str, voices: str = "en-us", clips: int | None = None) -> None:
    """Create a speech data set in LJSpeech format from transcripts.

    Speech is synthesized by espeak-ng (needs the extra `speech`), which has the license GPL-3.0-or-later and runs in a
    separate process. Rerun the same command with the same OUT to resume after an interruption.

    Example: subquad synthesize metadata.csv spoken --voices en-us,en-gb

    Args:
        metadata: File with lines of id|text or id|text|normalized text.
        out: Output folder for metadata.csv and wavs/.
        voices: Comma-separated espeak-ng voices. Each clip uses one of them, chosen at random.
        clips: Synthesize only this many lines, starting with the first. Default: all.
    """
    from subquad_lab.commands import synthesize

    synthesize.run(metadata, out, voices, clips)


def verify(
    claims: list[str] = [],  # noqa: B006
    json_: bool = False,
    plots: str | None = None,
    seed: int = 0,
    explain: bool = False,
) -> None:
    """Check the claims of the theory numerically; exit with 1 if a claim fails.

    Example: subquad verify attention --explain

    Args:
        claims: Claim numbers, or subjects: attention, recurrence, optimizers, networks. Default: all claims.
        json_: Print all results as JSON.
        plots: Folder for SVG plots; created if missing. Default: no plots.
        seed: Random seed.
        explain: Print the derivation of each claim with the numbers of this run.
    """
    from subquad_lab.commands import verify

    verify.run(claims, json_, plots, seed, explain)


def env(json_: bool = False) -> None:
    """Print versions, kernels, threads and calibration, for bug reports.

    Nothing is measured or written.

    Example: subquad env --json

    Args:
        json_: Print JSON instead of text.
    """
    from subquad_lab.commands import env

    env.run(json_)


def cache(clear: bool = False) -> None:
    """Show the files in the cache folder with their sizes and ages, or empty it.

    It holds calibrations of this machine, audio features and converted graphs; all of them can be recreated. Above a
    size limit, the least recently used features are removed.

    Example: subquad cache --clear

    Args:
        clear: Remove the files.
    """
    from subquad_lab.commands import cache

    cache.run(clear)


COMMANDS = (
    demo, plan, bench, verify, train, evaluate, compare, sweep, runs, sample, predict, transcribe, synthesize, report,
    serve, env, cache,
)  # fmt: skip
# What to make smaller if a command runs out of memory.
REMEDIES = {
    "plan": "use a smaller --length, --heads or --tokens, or a shorter sample",
    "bench": "use smaller --lengths, --heads or --head-dim",
    "train": "use a smaller --batch or a smaller model",
    "compare": "use a smaller --batch or a smaller model",
    "sweep": "use a smaller --batch or a smaller model",
    "sample": "use fewer --words",
    "predict": "use fewer or smaller images",
    "transcribe": "use fewer --beams or shorter recordings",
    "synthesize": "use fewer --clips",
    "report": "name fewer runs",
    "verify": "name fewer claims",
}
OUTPUT_FOLDERS = {"train": "runs", "compare": "compare", "sweep": "sweep"}  # of the commands that take an experiment


def _experiments() -> Any:
    """Return the experiments. They import torch, so only commands that need them call this."""
    from subquad_lab.experiments import EXPERIMENTS

    return EXPERIMENTS


def _check_command(given: Sequence[str]) -> None:
    """Raise UsageError unless the first argument is a command or an option."""
    names = [command.__name__ for command in COMMANDS]
    if given and (given[0] in names or given[0].startswith("-")):
        return
    similar = get_close_matches(given[0], names, 1) if given else []
    hint = f"; did you mean {similar[0]}?" if similar else "; see `subquad --help`"
    raise UsageError(f"COMMAND: expected one of {', '.join(names)}, got {repr(given[0]) if given else 'none'}{hint}")


def complain(message: object) -> None:
    """Print an error as a single line; the parser's own messages can span several."""
    say(f"subquad: error: {one_line(message)}", to_error=True)


def _how_to_install(error: ModuleNotFoundError) -> str:
    return (
        f"{error.name} is not installed: the `subquad` command needs the extra `lab`. In a checkout of subquad, run: "
        "pip install -c constraints.txt '.[lab]'"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Returns:
        0 for success, 1 for a run that fails, 2 for bad usage, 130 or 143 after SIGINT or SIGTERM.
    """
    from argparse import ArgumentError

    try:
        from subquad_lab.options.fields import wrong_value
        from subquad_lab.options.parsing import call
    except ModuleNotFoundError as error:
        complain(_how_to_install(error))
        return 1
    given = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: warn(message)
    try:
        try:
            _check_command(given)
            call(COMMANDS, OUTPUT_FOLDERS, given, _experiments)
        finally:
            sys.stdout.flush()  # inside the `try`, so that a closed pipe is caught below
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
        how = f"with: subquad train --resume {error.folder}" if is_run else "by running the same command again"
        say(f"subquad: {error}. Progress saved. Resume {how}", to_error=True)
        return error.exit_code
    except ModuleNotFoundError as error:
        complain(_how_to_install(error))
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe early. Python flushes once more at exit, so give it another sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        say("subquad: interrupted", to_error=True)
        return 130
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            remedy = REMEDIES.get(given[0], "free memory and try again")
            complain(f"out of memory in `subquad {given[0]}`; {remedy}. Completed files and checkpoints are kept")
        elif isinstance(error, OSError):  # such as standard output redirected to a full disk
            complain(f"{error.filename or 'output'}: {error.strerror}")
            return 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1
        else:
            raise
        return 1
    return 0
