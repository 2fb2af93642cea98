"""Bad invocations of `subquad`: every one must end with exit code 2 and a single error line, without a traceback.

    python tests/bad_invocations.py [--seed N] [--count N]      all of them as real processes; prints the faults

Wrong values come from the options themselves: each command's parameters and each experiment's fields, by their types.
Wrong combinations, files and run folders are listed by hand. `invocations` returns them in a random order that a seed
determines, so that a test can take the first few hundred.
"""

import argparse
import inspect
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from small_runs import write_pictures, write_text
from subquad_lab.cli import COMMANDS, OUTPUT_FOLDERS, main
from subquad_lab.experiments import EXPERIMENTS

MAX_SECONDS = 5.0  # of computing; a process that waits is killed after HANG_SECONDS
HANG_SECONDS = 120.0
EXPERIMENT_COMMANDS = tuple(OUTPUT_FOLDERS)
VALUES_PER_OPTION, FIELDS_PER_EXPERIMENT = 2, 5  # chosen at random, the same in every run
WRONG: dict[Any, list[str]] = {
    int: ["x", "1.5", "", "nan", "1e3", "1:30", "9" * 5000, "0b1", "²", "½", "--", "[1]", "{a: 1}", "\x1b[2J", "1 2",
          "0x", "true", "null", "null x", "&a 1", "*a", "!!int 3x", "\u202e7"],
    float: ["x", "", "nan", "1:30.5", "1,5", "--", "[1.0]", "½", "1e", "\u202e1", "infinity", "0x", "1e5e5", "true"],
    bool: ["maybe", "2", "", "nope", "[true]", "tru", "1.0"],
    Literal: ["x", "", "\x07", "ADAMW\n", "é", "a" * 3000],
}  # fmt: skip


class Bad(NamedTuple):
    """Arguments that are wrong, and a part of the line that says so, usually the option."""

    arguments: tuple[str, ...]
    mentions: str = ""


class Places(NamedTuple):
    """Files and folders to be wrong about, in one folder."""

    root: Path

    def __getattr__(self, name: str) -> str:
        return str(self.root / name)


def prepare(root: Path) -> Places:
    """Create files of all kinds, a trained run, and damaged copies of it."""
    places = Places(root)
    (root / "empty").write_bytes(b"")
    (root / "binary").write_bytes(bytes(range(256)) * 8)
    (root / "plain").write_text("some words\n")
    (root / "folder").mkdir()
    (root / "list.json").write_text("[1, 2")
    (root / "list.yaml").write_text("- 1\n- 2\n")
    (root / "null.yaml").write_text("lr: null\n")
    (root / "broken.yaml").write_text("lr: [1\n")
    (root / "twice.yaml").write_text("lr: 0.1\nlr: 0.2\n")
    (root / "other.yaml").write_text("experiment: chess\n")
    (root / "unknown.yaml").write_text("rate: 1\n")
    (root / "typed.yaml").write_text("batch: many\n")
    (root / "laughs.yaml").write_text("a: &a [x]\nb: [*a, *a]\n")
    (root / "link").symlink_to(root / "nowhere")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as own:
        here = os.open(".", os.O_RDONLY)
        os.chdir(root)  # The name of a socket must be short.
        own.bind("socket")
        os.fchdir(here)
        os.close(here)
    write_text(root / "text")
    write_pictures(root / "pictures.npz")
    options = dict(
        data=root / "text", out=root / "runs", model="rnn", embedding=6, width=8, context=5, batch=4, steps=4
    )
    assert main(["train", "language", *(f"--{name}={value}" for name, value in options.items())]) == 0
    _damage(root)
    return places


def _damage(root: Path) -> None:
    """Write copies of the run, each with one file that is wrong."""
    contents = {"empty": b"", "binary": bytes(range(256)), "cut": None, "list": b"[]", "nested": b"[" * 50_000}
    for file in ("config.yaml", "run.json"):
        for kind, content in contents.items():
            folder = root / f"damaged-{file}-{kind}"
            shutil.copytree(root / "runs" / "language-001", folder)
            whole = (folder / file).read_bytes()
            (folder / file).write_bytes(
                whole[: len(whole) // 2].rstrip(b"\n") + b"\n: [" if content is None else content
            )
        folder = root / f"damaged-{file}-missing"
        shutil.copytree(root / "runs" / "language-001", folder)
        (folder / file).unlink()
        os.mkfifo(folder / file) if file == "run.json" else None
    for file in ("tensors.safetensors", "state.json", "SHA256SUMS"):
        folder = root / f"damaged-{file}"
        shutil.copytree(root / "runs" / "language-001", folder)
        for path in (folder / "checkpoints").glob(f"*/{file}"):
            path.write_bytes(path.read_bytes()[:-7] + b"damaged")


def invocations(places: Places, seed: int = 0) -> list[Bad]:
    """Return all bad invocations, in an order that the seed determines."""
    found = [*_of_values(places), *_of_commands(), *_of_files(places), *_of_sizes(places), *_of_runs(places)]
    random.Random(seed).shuffle(found)
    return found


def _wrong_values(annotation: Any) -> list[str]:
    """Return values that are not of a type; none for a text, where everything is one."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return [value for value in _wrong_values(kinds[0]) if value != "null"] if len(kinds) == 1 else []
    return WRONG.get(Literal if get_origin(annotation) is Literal else annotation, [])


def _without_data(experiment: str, places: Places) -> tuple[str, ...]:
    """Return options with which no training starts, even if a wrong value is accepted."""
    has_data = any(field.name == "data" for field in fields(EXPERIMENTS[experiment].config))
    return ("--data", places.nowhere) if has_data else ("--length", "1")


def _of_values(places: Places) -> Iterator[Bad]:
    """Values of the wrong type, for each option of each command and each field of each experiment."""
    draw = random.Random(1)
    for command in COMMANDS:
        name = command.__name__
        if name in EXPERIMENT_COMMANDS:
            for experiment, each in EXPERIMENTS.items():
                hints = get_type_hints(each.config)
                names = [field.name for field in fields(each.config)]
                for field in draw.sample(names, FIELDS_PER_EXPERIMENT):
                    if values := _wrong_values(hints[field]):
                        if name == "compare" and field in each.varied:
                            continue
                        option = f"--{field.replace('_', '-')}"
                        yield Bad((name, experiment, *_without_data(experiment, places),
                                   f"{option}={draw.choice(values)}"), option)  # fmt: skip
            continue
        parameters = inspect.signature(command).parameters.values()
        positional = [places.nowhere for p in parameters if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
        for parameter in parameters:
            option = f"--{parameter.name.rstrip('_').replace('_', '-')}"
            values = _wrong_values(parameter.annotation)
            for value in draw.sample(values, min(VALUES_PER_OPTION, len(values))):
                yield Bad((name, *positional, f"{option}={value}"), option)


def _of_commands() -> Iterator[Bad]:
    """Words and options that a command does not have."""
    for word in (
        "",
        "trian",
        "--nonsense",
        "-x",
        "train language",
        "\x1b[31m",
        "ünïcode",
        "a" * 5000,
        "--version=3",
        "'",
    ):
        yield Bad((word,))
    yield Bad(())
    for command in COMMANDS:
        name = command.__name__
        inner = (name, "language") if name in EXPERIMENT_COMMANDS else (name,)
        for wrong in ("--nonsense", "--nonsense=1", "-q", "--Out=x", "--\x00".replace("\x00", "é"), "--\x1b[2J=1"):
            yield Bad((*inner, wrong))
        if not any(p.annotation == list[str] for p in inspect.signature(command).parameters.values()):
            yield Bad((*inner, "one", "more", "word", "than", "expected"))
    for command in EXPERIMENT_COMMANDS:
        for wrong in ("chess", "", "Language", "language images", "--preset", "speech\n"):
            yield Bad((command, wrong))
        yield Bad((command, "language", "--preset", "nothing"), "--preset")
        yield Bad((command, "language", "--preset", ""), "--preset")
        yield Bad((command, "language", "--classes", "3"))
        yield Bad((command, "images", "--context", "3"))
        yield Bad((command, "graphs", "--characters", "3"))
        yield Bad((command, "speech", "--embedding", "3"))
        yield Bad((command, "recall", "--data", "x"))
        yield Bad((command, "language", "--lr"))
        yield Bad((command, "language", "language"))
    for command in ("evaluate", "sample", "predict", "transcribe", "synthesize"):
        yield Bad((command,))
    yield Bad(("sweep", "language"))
    yield Bad(("sweep", "language", "--grid.nothing", "1,2"), "nothing")
    yield Bad(("sweep", "language", "--grid.lr", ""), "lr")
    yield Bad(("sweep", "language", "--grid.lr"), "--grid.lr")
    yield Bad(("sweep", "language", "--grid.lr", "1,x"), "lr")
    yield Bad(("sweep", "language", "--grid.lr", "1:30"), "lr")
    yield Bad(("sweep", "language", "--grid.lr", "[*a"), "--grid.lr")
    yield Bad(("sweep", "language", "--span.lr", "1"), "lr")
    yield Bad(("sweep", "language", "--span.lr", "2,1"), "lr")
    yield Bad(("sweep", "language", "--span.model", "rnn,lstm"), "model")
    yield Bad(("sweep", "language", "--span.lr", "nan,1"), "lr")
    yield Bad(("sweep", "language", "--grid.", "1"))
    yield Bad(("sweep", "language", "--span.lr", "0.1,1", "--trials", "0"), "--trials")
    yield Bad(("compare", "language", "--model", "rnn"), "--model")


def _of_files(places: Places) -> Iterator[Bad]:
    """Files where folders are expected, folders where files are, and what is neither."""
    kinds = ("nowhere", "empty", "binary", "folder", "fifo", "socket", "link")
    others = ("/dev/zero", "/dev/null", "", "a\nb", "\x1b]0;x\x07", "\udcff", "/proc/self/mem")
    paths = [*(getattr(places, kind) for kind in kinds), *others]
    yaml = (
        "list.yaml",
        "null.yaml",
        "broken.yaml",
        "twice.yaml",
        "other.yaml",
        "unknown.yaml",
        "typed.yaml",
        "laughs.yaml",
    )
    for path in [*paths, *(getattr(places, name) for name in yaml)]:
        if path not in (places.empty, "/dev/null"):  # An empty config is valid.
            yield Bad(("train", "language", "--data", places.nowhere, "--config", path))
    for path in paths:
        yield Bad(("train", "language", "--data", path), "--data")
        yield Bad(("train", "images", "--data", path), "--data")
        yield Bad(("train", "graphs", "--data", path), "--data")
        yield Bad(("train", "speech", "--data", path), "--data")
        yield Bad(("plan", "--sample", path), "--sample")
        yield Bad(("plan", "--model", path, "--text", places.plain), "--model")
        yield Bad(("plan", "--model", places.folder, "--text", path), "--")
        if path:  # "" is the current folder.
            yield Bad(("report", path))
        yield Bad(("report", "--theory", path, places.runs))
        yield Bad(("synthesize", path, places.out))
        yield Bad(("evaluate", path))
        yield Bad(("sample", path))
        yield Bad(("train", "--resume", path))
        yield Bad(("predict", path, places.plain))
        yield Bad(("transcribe", path, places.plain))
    for experiment in EXPERIMENTS:
        yield Bad(("train", experiment, "--data", places.text, "--out", ""), "--out")
    for path in (places.plain, places.empty, places.fifo, "/dev/null", f"{places.plain}/x"):
        yield Bad(("demo", "--out", path), "--out")
        yield Bad(("train", "language", "--data", places.text, "--out", path))
        yield Bad(("sweep", "language", "--data", places.text, "--grid.lr", "1", "--out", path))
        yield Bad(("compare", "language", "--data", places.text, "--out", path), "--out")
        yield Bad(("runs", "--root", path), "--root")
        yield Bad(("serve", "--root", path), "--root")
    for path in (places.nowhere, "\x1b[2J"):
        yield Bad(("runs", "--root", path), "--root")
        yield Bad(("serve", "--root", path), "--root")
    yield Bad(("serve", "--root", ""), "--root")
    for words in (
        ("train", "language", "--data"),
        ("evaluate",),
        ("report",),
        ("plan", "--sample"),
        ("train", "--resume"),
    ):
        yield Bad((*words, "x" * 300), "File name too long")


def _of_sizes(places: Places) -> Iterator[Bad]:
    """Numbers out of range, and options that exclude each other."""
    sized = ("plan", "--length", "64", "--head-dim", "8")
    for option in ("--length", "--head-dim", "--heads", "--key-length", "--value-dim", "--key-heads", "--batch"):
        for value in ("0", "-1", str(2**63), str(10**30)):
            yield Bad((*sized, option, value), option)
    for option in ("--max-error", "--logit-range"):
        for value in ("-1", ".nan", "-.inf", "-1e308"):
            yield Bad((*sized, option, value), option)
    yield Bad((*sized, "--max-error", ".inf"), "--max-error")
    for value in ("-1", "65536", str(2**63)):
        yield Bad(("serve", "--port", value), "--port")
    yield Bad((*sized, "--dtype", "int8"), "--dtype")
    yield Bad((*sized, "--dtype", ""), "--dtype")
    yield Bad((*sized, "--purpose", "fun"), "--purpose")
    yield Bad((*sized, "--key-heads", "3", "--heads", "8"), "--key-heads")
    yield Bad((*sized, "--model", places.folder))
    yield Bad((*sized, "--text", places.plain))
    yield Bad(("plan",))
    yield Bad(("plan", "--length", "64"), "--head-dim")
    yield Bad(("plan", "--model", places.folder, "--text", places.plain, "--tokens", "-5"))
    wrong = {
        "--methods": ("softmax", "", "taylor:x", "taylor:-1", "random:0", "window:0", "linear:tanh", "taylor:2,,",
                      "taylor:999999999", "\x1b[2J"),
        "--lengths": ("", "0", "-5", "1.5", "64,x", "9" * 40),
        "--heads": ("0", "-1", str(10**15)),
        "--head-dim": ("0", str(10**12)),
        "--out": ("",),
    }  # fmt: skip
    for option, value in ((option, value) for option, values in wrong.items() for value in values):
        yield Bad(("bench", option, value), "--")
    for claim in ("0", "-1", "999", "nothing", "", "1.5", "\x07", "²"):
        yield Bad(("verify", claim))
    yield Bad(("verify", "14", "--plots", ""), "--plots")
    yield Bad(("verify", "14", "--plots", places.plain), "--plots")
    yield Bad(("verify", "14", "--seed", str(2**70)), "--seed")
    guarded = ("--data", places.nowhere)
    for experiment in EXPERIMENTS:
        for option, value in (("--lr", "-1"), ("--lr", ".nan"), ("--lr", ".inf"), ("--batch", "0"), ("--batch", "-4"),
                              ("--steps", "-1"), ("--epochs", "-1"), ("--seeds", "0"), ("--seeds", "-2"),
                              ("--seed", str(2**70)), ("--weight-decay", ".nan")):  # fmt: skip
            if option[2:].replace("-", "_") in {field.name for field in fields(EXPERIMENTS[experiment].config)}:
                yield Bad(("train", experiment, *_without_data(experiment, places), option, value), option)
    for value in ("0", "-8", "3"):
        yield Bad(("train", "language", *guarded, "--model", "transformer", "--heads", value), "--heads")
    for method in ("softmax", "", "taylor:x", "taylor:-1", "random:0", "window:-3", "\x1b[2J"):
        yield Bad(("train", "language", *guarded, "--method", method), "--method")
        yield Bad(("train", "convert", *guarded, "--methods", method), "--methods")
    for option, value in (("--tokens", "0"), ("--adapt-tokens", "-1"), ("--rank", "0"), ("--weights", "best"),
                          ("--patience", "1"), ("--context", "3"), ("--transfer-lr", ".nan"), ("--untrained", "x"),
                          ("--evaluate-tokens", "0"), ("--repeats", "2"), ("--units", "bytes")):  # fmt: skip
        yield Bad(("train", "convert", *guarded, option, value), option)
    for path in (places.nowhere, places.plain, places.folder, places.fifo):
        yield Bad(("train", "convert", "--data", places.text, "--model", path), "--model")
        yield Bad(("train", "recall", "--method", f"exact,{method}"), "--method")
    for option, values in {
        "--pairs": ("", "0", "x", "4,", "-4", "1.5", "²", "9" * 30), "--length": ("0", "-1", "5", str(10**12)),
        "--vocabulary": ("0", "3"), "--width": ("0", "-8"), "--heads": ("0", "3"), "--layers": ("0", "-1"),
    }.items():  # fmt: skip
        for value in values:
            yield Bad(("train", "recall", option, value), option[2:])
    yield Bad(("compare", "recall", "--method", "exact"), "--method")


def _of_runs(places: Places) -> Iterator[Bad]:
    """Damaged runs, and options of commands that read runs."""
    for folder in sorted(places.root.glob("damaged-*")):
        for command in (("evaluate",), ("sample",), ("train", "--resume"), ("predict",), ("transcribe",)):
            is_finished = command[0] == "train" and "config.yaml" not in folder.name
            if not is_finished:  # Nothing of a finished run is computed again.
                more = (places.plain,) if command[0] in ("predict", "transcribe") else ()
                yield Bad((*command, str(folder), *more))
    run = str(places.root / "runs" / "language-001")
    for option, value in (("--count", "0"), ("--count", "-1"), ("--words", "0"), ("--words", "-5"), ("--top-k", "0"),
                          ("--top-k", "-1"), ("--top-p", "0"), ("--top-p", "1.5"), ("--top-p", ".nan"),
                          ("--temperature", "-1"), ("--temperature", ".nan"), ("--temperature", ".inf"),
                          ("--seed", str(2**70)), ("--seed", "-1")):  # fmt: skip
        yield Bad(("sample", run, option, value), option)
    yield Bad(("predict", run, places.plain))
    yield Bad(("predict", run))
    yield Bad(("transcribe", run, places.plain))
    yield Bad(("transcribe", run, places.plain, "--beams", "0"), "--beams")
    yield Bad(("transcribe", run, places.plain, "--beams", "-1"), "--beams")
    yield Bad(("transcribe", run, places.plain, "--beams", str(10**9)), "--beams")
    yield Bad(("evaluate", run, "--part", "train"), "--part")
    yield Bad(("evaluate", run, run))
    for value in ("0", "-1", str(10**9)):
        yield Bad(("evaluate", run, "--longest", value), "longest")
        yield Bad(("train", "language", "--data", places.text, "--longest", value), "longest")
    yield Bad(("train", "--resume", run, "--lr", "3"), "--resume")
    yield Bad(("train", "language", "--resume", run), "--resume")
    yield Bad(("train", "--resume"))
    yield Bad(("report", run, "--out", places.folder), "--out")
    yield Bad(("report", run, "--out", places.nowhere + "/x.html"), "--out")
    yield Bad(("report", run, "--out", ""), "--out")
    yield Bad(("report", run, "--theory", places.binary), "--theory")


def fault_of(bad: Bad, code: int, out: str, err: str, seconds: float = 0.0, limit: float = MAX_SECONDS) -> str | None:
    """Return what is wrong about the end of a bad invocation; None if it ended as it should."""
    errors = [line for line in err.splitlines() if line.startswith("subquad: error: ")]
    others = [line for line in err.splitlines() if not line.startswith(("subquad: error: ", "subquad: warning: "))]
    checks = {
        "a traceback": "Traceback" not in err,
        f"exit code {code}": code == 2,
        f"{len(errors)} error lines": len(errors) == 1,
        f"other lines on standard error: {others[:2]}": not others,
        "control characters": err.replace("\n", "").isprintable(),
        f"output: {out[:80]!r}": out == "",
        f"the line does not mention {bad.mentions}": bad.mentions in (errors or [""])[0],
        f"{seconds:.1f} s": seconds <= limit,
    }
    failed = [what for what, is_right in checks.items() if not is_right]
    return "; ".join(failed) or None


def run_as_process(bad: Bad, cwd: Path) -> tuple[int, str, str, float]:
    """Run the command in a process; return its exit code, output, errors and seconds of computing."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-m", "subquad_lab", *bad.arguments]
        actions = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, err.fileno(), 2)]
        before = os.getcwd()
        os.chdir(cwd)
        process = os.posix_spawn(
            sys.executable, command, os.environ | {"SUBQUAD_CACHE": str(cwd / "cache")}, file_actions=actions
        )
        os.chdir(before)
        end = time.monotonic() + HANG_SECONDS
        while not (done := os.wait4(process, os.WNOHANG))[0]:
            time.sleep(0.02)
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    return os.waitstatus_to_exitcode(done[1]), texts[0], texts[1], done[2].ru_utime + done[2].ru_stime


def torture(seed: int, count: int | None) -> int:
    """Run them all as processes, print the faults, and return their number."""
    faults, slowest = 0, (0.0, Bad(()))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        chosen = invocations(prepare(root), seed)[:count]
        for bad in chosen:
            code, out, err, seconds = run_as_process(bad, root)
            slowest = max(slowest, (seconds, bad))
            if fault := fault_of(bad, code, out, err, seconds):
                faults += 1
                shown = " ".join(word[:60] for word in bad.arguments)
                print(f"{shown!r}: {fault}\n    {err[-300:]!r}", flush=True)
    print(f"{len(chosen)} bad invocations, {faults} faults; slowest: {slowest[0]:.1f} s of computing")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=None, help="how many; default: all")
    given = parser.parse_args()
    sys.exit(1 if torture(given.seed, given.count) else 0)
