"""Speech to characters: both decoders on three kinds of speech, and linear attention in the encoder.

    python benchmarks/speech.py numbers [--out runs/benchmark]
    python benchmarks/speech.py digits --data FOLDER        spoken digits: both decoders, split by index; by speaker
    python benchmarks/speech.py ljspeech --data FOLDER      as `subquad synthesize` makes it, or the real one
    python benchmarks/speech.py encoders --data FOLDER      spoken digits: exact, Taylor, random and separable encoders

Each part has a page of its own. Runs that are finished are read, and those that were stopped go on.
"""

import argparse
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from results import FOLDER, machine, today, write_page

from subquad_lab.commands.compare import differences, verdicts
from subquad_lab.experiments import speech
from subquad_lab.experiments.speech import Config
from subquad_lab.figures.plots import compared
from subquad_lab.system.timing import best_seconds, peak_bytes
from subquad_lab.training.seeds import Series, train

ENCODERS = ("exact", "taylor:2", "random:64", "separable")
LONG, CLIPS = 2000, 4  # frames of a clip of 20 s, and how many at once, for the memory of a step
FIGURES = ("character_error", "word_error", "jaccard", "cosine", "damerau", "loss")
PICTURES = {"similarities": "similarities by epoch", "losses": "losses by epoch", "looks": "where the decoder looked"}

# On two cores in an hour for both decoders, in two hours, and in ten minutes for each encoder.
MEASURE = speech.EXPERIMENT.measure
DIGITS = dict(epochs=20, characters=97)
LJSPEECH = dict(epochs=12, clips=3000)
SHORT = dict(epochs=8, characters=97)


def line(name: str, series: Series) -> str:
    result, about = series.results[0], series.runs[0].about()
    test, seconds, epochs = result["test"], result["seconds"], result["epochs"]
    cells = [
        name, f"{about['parameters']['total']:,}", f"{epochs:.0f}", f"{seconds / 60:.1f} min",
        f"{seconds / epochs:.0f} s", str(about["versions"]["threads"]), *(f"{test[of]:.3f}" for of in FIGURES),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(made: dict[str, Series]) -> str:
    head = ["", "parameters", "epochs", "training", "an epoch", "threads", *(f.replace("_", " ") for f in FIGURES)]
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join([f"| {' | '.join(head)} |", f"| {' | '.join(rule)} |",
                      *(line(name, series) for name, series in made.items())])  # fmt: skip


def by_epoch(name: str, made: dict[str, Series]) -> list[str]:
    """A picture of all together, and those of each."""
    together = f"{name}_{today()}.svg"
    (FOLDER / together).write_bytes(compared({of: series.runs for of, series in made.items()}, speech.EXPERIMENT))
    shown = [f"![training loss and validation character error]({together})"]
    for of, series in made.items():
        for picture, what in PICTURES.items():
            file = f"{name}_{of.partition(',')[0].replace(' ', '-').replace(':', '-')}_{picture}_{today()}.svg"
            (FOLDER / file).write_bytes((series.runs[0].folder / f"{picture}.svg").read_bytes())
            shown.append(f"![{of}: {what}]({file})")
    return shown


def write(name: str, title: str, made: dict[str, Series], parts: list[str], more: dict[str, Series] = {}) -> None:  # noqa: B006
    data = next(iter(made.values())).runs[0].about()["data"]
    described = (
        f"{data['name']}: clips {data['sizes']}, {data['skipped']} left out; test figures of the best validation "
        f"weights, seed {Config.seed}."
    )
    page = [f"# {title}, {today()}", machine(), described, table(made), *parts]
    records = [{"run": of, **series.results[0]} for of, series in (made | more).items()]
    write_page(name, "\n\n".join(page) + "\n", records)


def spelled(series: Series) -> str:
    clips = series.runs[0].read_json("looks.json")["clips"]
    return "\n".join(f"- {clip['wanted']!r} was spelled {clip['given']!r}" for clip in clips)


def numbers(options: argparse.Namespace) -> None:
    made = {Config.decoder: train(speech.EXPERIMENT, Config(), options.out / "speech-numbers")}
    parts = ["`subquad train speech`", spelled(made[Config.decoder]), *by_epoch("speech_numbers", made)]
    write("speech_numbers", "Spoken numbers, synthetic", made, parts)


def digits(options: argparse.Namespace) -> None:
    base = Config(data=options.data, **DIGITS)
    made = {of: train(speech.EXPERIMENT, config, options.out / f"speech-digits-{of}")
            for of, config in speech.variants(base).items()}  # fmt: skip
    best = min(made, key=lambda of: made[of].results[0]["valid"][MEASURE])
    strangers = train(
        speech.EXPERIMENT, replace(base, decoder=best, split="speaker"), options.out / "speech-digits-speaker"
    )
    parts = [
        f"`subquad compare speech --data fsdd --epochs {DIGITS['epochs']} --characters {DIGITS['characters']}`: "
        "strings of 3 to 6 spoken digits, split by index.",
        "\n".join(f"- {line}" for line in verdicts(made, MEASURE, differences(made, MEASURE))),
        spelled(made[best]),
        *by_epoch("speech_digits", made),
        "## A speaker who was never heard",
        table({f"{best}, by speaker": strangers}),
    ]
    write("speech_digits", "Spoken digits", made, parts, {f"{best}, by speaker": strangers})


def ljspeech(options: argparse.Namespace) -> None:
    base = Config(data=options.data, **LJSPEECH)
    made = {of: train(speech.EXPERIMENT, config, options.out / f"speech-ljspeech-{of}")
            for of, config in speech.variants(base).items()}  # fmt: skip
    published = "\n".join(f"- published, {row['data']}: {row['what']}" for row in speech.EXPERIMENT.published)
    best = min(made, key=lambda of: made[of].results[0]["valid"][MEASURE])
    parts = [published, spelled(made[best]), *by_epoch("speech_ljspeech", made)]
    write("speech_ljspeech", "LJSpeech's transcripts", made, parts)


def encoders(options: argparse.Namespace) -> None:
    made = {method: train(speech.EXPERIMENT, Config(data=options.data, method=method, **SHORT),
                          options.out / f"speech-encoder-{method.replace(':', '-')}")
            for method in ENCODERS}  # fmt: skip
    rows = []
    for method in ENCODERS:
        found = measured(method)
        rows.append(f"| {method} | {found['seconds']:.2f} s | {found['bytes'] / 2**20:,.0f} MiB |")
    parts = [
        f"Attention of the encoder, all else equal: {Config.decoder} decoder, {SHORT['epochs']} epochs.",
        *by_epoch("speech_encoders", made)[:1],
        f"## A step with {CLIPS} clips of 20 s",
        "Forward and backward of the whole network, in a process of its own; memory above what it held before.",
        "\n".join(["| encoder | time | peak memory |", "|---|---:|---:|", *rows]),
    ]
    write("speech_encoders", "Linear attention in the encoder, spoken digits", made, parts)


def measured(method: str) -> dict[str, float]:
    """Of a step, in a fresh process."""
    with get_context("spawn").Pool(1) as process:
        return process.apply(step, (method,))


def step(method: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = speech.make_model(Config(method=method))
    tokens = torch.randint(4, 35, (CLIPS, 90))

    def once(frames: int = LONG) -> None:
        sound, lengths = torch.randn(CLIPS, frames, 80), torch.full((CLIPS,), frames)
        model(sound, lengths, tokens).sum().backward()

    once(64)  # pays for what torch sets up once
    return {"bytes": peak_bytes(once), "seconds": best_seconds(once, 3, 2.0)}


PARTS = {"numbers": numbers, "digits": digits, "ljspeech": ljspeech, "encoders": encoders}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech to characters.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", help="folder of the clips; needed by all but numbers")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    options = parser.parse_args()
    if (options.data is None) != (options.part == "numbers"):
        parser.error("--data: expected a folder of clips, by all parts but numbers")
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
