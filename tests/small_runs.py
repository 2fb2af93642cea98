"""Small runs that tests train, break off and read, and small data for them."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml

from subquad_lab.experiments import EXPERIMENTS, convert, graphs, images, language, recall, speech
from subquad_lab.experiments.language import Config
from subquad_lab.experiments.stored import opened
from subquad_lab.system.checksums import SUMS, as_lines, closed, digest
from subquad_lab.training import checkpoint, seeds, snapshot
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.loop import Trainer
from subquad_lab.training.run import METRICS, RESULT, TIMING, Run

MODELS = {
    "rnn": dict(model="rnn", embedding=6, width=8, context=5, tied=False),
    "lstm": dict(model="lstm", embedding=6, width=8, layers=2, context=5),
    "transformer": dict(model="transformer", width=8, heads=2, layers=1, context=5, method="random:8"),
}


OTHERS: dict[str, tuple[str, dict]] = {
    "pool": ("images", dict(downsample="pool")),
    "stride": ("images", dict(downsample="stride", optimizer="adam")),
    "gcn": ("graphs", dict()),
    "attention": ("graphs", dict(mixer="both", method="random:8")),
    "lstm decoder": ("speech", dict(decoder="lstm", method="random:8")),
    "attention decoder": ("speech", dict(decoder="attention", decoder_method="taylor:2")),
    "recall": ("recall", dict(method="window:4,random:8", layers=2, positions="rotary")),
    "conversion": ("convert", dict(methods="window:2+hedgehog,linear:elu", untrained="window:2")),
}

# Of `train speech`, over in a second or two.
SPEECH_OPTIONS = [
    "--clips", "60", "--batch", "10", "--width", "16", "--blocks", "1", "--lr", "0.01", "--warmup", "5"
]  # fmt: skip


def write_text(folder: Path) -> Path:
    """A folder with a small text in three parts; each word follows from the one before it, most of the time."""
    words = [f"w{i}" for i in range(20)]
    folder.mkdir()
    draw = random.Random(0)
    for part, count in (("train", 1200), ("valid", 150), ("test", 150)):
        numbers = [0]
        while len(numbers) < count:
            numbers.append((numbers[-1] * 3 + 1) % 20 if draw.random() < 0.8 else draw.randrange(20))
        lines = [" ".join(words[i] for i in numbers[k : k + 10]) for k in range(0, count, 10)]
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_pictures(path: Path, classes: int = 3, **changes: np.ndarray | None) -> Path:
    """An npz file in MedMNIST's layout: 12x12, each class with a bright quarter of its own; some arrays changed."""
    draw = np.random.default_rng(0)
    arrays: dict[str, np.ndarray | None] = {}
    for part, count in (("train", 50), ("val", 20), ("test", 21)):
        labels = draw.integers(classes, size=(count, 1)).astype(np.uint8)
        labels[:classes, 0] = range(classes)
        images = draw.integers(0, 120, size=(count, 12, 12)).astype(np.uint8)
        for image, (label,) in zip(images, labels, strict=True):
            image[6 * (label % 2) :, 6 * (label // 2) :][:6, :6] += 120
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    np.savez(path, **{key: array for key, array in (arrays | changes).items() if array is not None})
    return path


def heed_interrupts() -> None:
    """In a process that begins: what a shell starts in the background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def tone(pitch: float, seconds: float, rate: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def write_digits(folder: Path, speakers: tuple[str, ...] = ("ann", "bob", "cid")) -> Path:
    """A folder like that of the spoken digits: a tone for each digit and speaker, some clips for each part."""
    folder.mkdir(exist_ok=True)
    for digit in range(10):
        for voice, speaker in enumerate(speakers):
            for index in (0, 4, 5, 9, 10):
                content = tone(300 + 150 * digit + 20 * voice + index, 0.06, 8000)
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", content, 8000)
    return folder


def small(name: str, text: Path, **changes) -> tuple[Experiment, Training]:
    """An experiment and a config of 30 steps: a language model, or one of the others."""
    if name in MODELS:
        return language.EXPERIMENT, tiny(text, name, **changes)
    of, own = OTHERS[name]
    experiment = EXPERIMENTS[of]
    if of == "images":
        common = dict(data=str(write_pictures(text / "pictures.npz")), batch=8, lr=0.02, momentum=0.5)
        return experiment, images.Config(**common | dict(seeds=1, steps=30, evaluate_every=7) | own | changes)
    if of == "recall":
        sizes = dict(pairs="2,3", length=16, vocabulary=12, width=8, batch=4, warmup=3)
        return experiment, recall.Config(**sizes | dict(steps=30, evaluate_every=7) | own | changes)
    if of == "convert":  # 10 steps in each stage
        sizes = dict(
            data=str(text), units="words", batch=4, context=8, width=8, heads=2, layers=1, rank=2, warmup=3, lr=0.02
        )
        budget = dict(exact_tokens=320, tokens=320, adapt_tokens=320, evaluate_tokens=64, evaluate_every=7)
        return experiment, convert.Config(**sizes | budget | dict(dropout=0.3) | own | changes)
    if of == "speech":
        sizes = dict(
            data=str(write_digits(text / "digits")), clips=36, batch=4, width=8, blocks=1, warmup=3, characters=9
        )
        return experiment, speech.Config(**sizes | dict(steps=30, evaluate_every=7) | own | changes)
    return experiment, graphs.Config(**dict(seeds=1, steps=30, evaluate_every=7) | own | changes)


def tiny(text, name: str = "rnn", **changes) -> Config:
    common = dict(data=str(text), batch=4, steps=30, evaluate_every=7, dropout=0.3, lr=0.02, warmup=3)
    return Config(**common | MODELS[name] | changes)


def start(config: Training, root: Path, name: str | None = None, experiment: Experiment = language.EXPERIMENT):
    """A new run with one seed, and its result."""
    series = seeds.train(experiment, config, root / name if name else root, numbered=name is None)
    return series.runs[0], series.results[0]


def resume(folder: Path, experiment: Experiment | None = None) -> tuple[Run, dict]:
    """Go on with a run; its experiment may be another than the one that it names."""
    found, config = opened(folder)
    series = seeds.train(experiment or found, config, folder)
    return series.runs[0], series.results[0]


def listed(folder: Path) -> list[str]:
    """The names in SHA256SUMS, apart from the code that reads it."""
    return [line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()[:-1]]


def reseal(folder: Path) -> None:
    """Checksums that fit, as whoever changed the files of a run on purpose would write them."""
    sums = {name: digest((folder / name).read_bytes()) for name in listed(folder) if (folder / name).is_file()}
    (folder / SUMS).write_bytes(closed(as_lines(sums)))


def unfinish(folder: Path) -> None:
    """Make a finished run what it was after its last checkpoint."""
    (folder / RESULT).unlink()
    lines = (folder / SUMS).read_text().splitlines(keepends=True)[:-1]
    kept = "".join(line for line in lines if line.split()[1] not in (RESULT, METRICS, TIMING))
    (folder / SUMS).write_bytes(closed(kept.encode()))


def final(run: Run) -> tuple[dict[str, torch.Tensor], bytes]:
    """The parameters of the last checkpoint, and the log."""
    found = checkpoint.newest(run.checkpoints)
    assert found is not None
    return snapshot.unpack("model", found.tensors), (run.folder / METRICS).read_bytes()


def assert_same(one: Run, other: Run) -> None:
    (weights, log), (others, other_log) = final(one), final(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert log == other_log


def broken_off(
    config: Training, folder: Path, step: int, error: BaseException, experiment: Experiment = language.EXPERIMENT
) -> None:
    """A run that ends with an error after a step: what was interrupted is saved, anything else is a crash."""
    after_step = Trainer._stop_if_asked

    def stop(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.progress.step == step:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_stop_if_asked", stop)
        with pytest.raises(type(error)):
            start(config, folder.parent, folder.name, experiment)


def read_config(folder: Path) -> dict:
    """Apart from the code that wrote it."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    assert content.pop("experiment") == "language"
    return content
