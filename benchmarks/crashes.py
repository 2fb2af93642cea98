"""Kill a training run repeatedly at random moments, and check that it can always resume and ends identically.

    python benchmarks/crashes.py [--kills 200]

A process that has imported everything forks; the child trains with a checkpoint after every step and is killed by
SIGKILL at a random moment, possibly while it loads, evaluates or writes. After each kill the latest checkpoint is read.
After the last kill the run is resumed to its end, and its parameters and log are compared bit by bit with those of an
uninterrupted run.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from results import machine, today, write_page
from rich.progress import track
from torch import Tensor

from subquad_lab.experiments.language import EXPERIMENT, Config
from subquad_lab.training import checkpoint, seeds
from subquad_lab.training.run import METRICS, Run
from subquad_lab.training.snapshot import unpack

MAX_SECONDS = 1.0  # before a kill
STEPS = 60  # of the run, per kill


def write_text(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir()
    for part, count in (("train", 2000), ("valid", 200), ("test", 200)):
        lines = (" ".join(f"w{draw.randrange(30)}" for _ in range(10)) for _ in range(count))
        (folder / f"{part}.txt").write_text("\n".join(lines))


def killed_after(seconds: float, root: Path, config: Config) -> None:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            train(root, config)
        finally:
            os._exit(0)
    time.sleep(seconds)
    if os.waitpid(child, os.WNOHANG)[0]:
        raise SystemExit("the run finished before all kills; it needs more steps")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def train(root: Path, config: Config) -> Run:
    return seeds.train(EXPERIMENT, config, root / "killed").runs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a training run repeatedly and check that it resumes.")
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills
    torch.set_num_threads(1)  # A forked process has no other threads.
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_text(root / "text")
        sizes = dict(model="lstm", embedding=16, width=16, layers=1, context=5, batch=4)
        config = Config(data=str(root / "text"), steps=STEPS * kills, evaluate_every=200, save_every=1, **sizes)
        whole = seeds.train(EXPERIMENT, config, root / "whole").runs[0]
        found: Counter[str] = Counter()
        steps = [0]
        for _ in track(range(kills), "killing"):
            killed_after(draw.uniform(0, MAX_SECONDS), root, config)
            folder = root / "killed"
            if not folder.is_dir() or not checkpoint.numbers(folder / "checkpoints"):
                found["killed before the first step: started over"] += 1
                continue
            last = checkpoint.newest(folder / "checkpoints")
            assert last is not None
            steps.append(last.state["progress"]["step"])
            found["an intact checkpoint"] += 1
            hidden = [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
            found["of these, killed while a checkpoint was written or removed"] += bool(hidden)
            assert steps[-1] >= steps[-2], "a checkpoint was lost"
        run = train(root, config)
        same_log = (run.folder / METRICS).read_bytes() == (whole.folder / METRICS).read_bytes()
        same_weights = equal(weights(run), weights(whole))
    rows = [{"after a kill": what, "times": count} for what, count in found.items()]
    lines = [f"| {what} | {count} |" for what, count in found.items()]
    page = [f"# A training run killed {kills} times, {today()}", machine()]
    page.append("\n".join(["| after a kill | times |", "|---|---:|", *lines]))
    verdict = {True: "equal", False: "NOT equal"}
    page.append(f"Step of the last kill: {steps[-1]:,} of {STEPS * kills:,}.")
    page.append(
        f"Bit-for-bit comparison with an uninterrupted run: parameters {verdict[same_weights]}, log "
        f"{verdict[same_log]}."
    )
    write_page("crashes", "\n\n".join(page) + "\n", rows)


def weights(run: Run) -> dict[str, Tensor]:
    found = checkpoint.newest(run.checkpoints)
    assert found is not None
    return unpack("model", found.tensors)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


if __name__ == "__main__":
    main()
