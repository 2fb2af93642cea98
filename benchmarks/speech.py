"""Speech recognition: both decoders on three kinds of speech, and linear attention in the encoder.

    python benchmarks/speech.py numbers [--out runs/benchmark]
    python benchmarks/speech.py digits --data FOLDER        spoken digits: both decoders, split by index; by speaker
    python benchmarks/speech.py ljspeech --data FOLDER      LJSpeech, or a folder from `subquad synthesize`
    python benchmarks/speech.py encoders --data FOLDER      spoken digits: exact, Taylor, random and separable encoders

Each part has its own page. Finished runs are read, and interrupted runs are resumed.
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
STEP_FRAMES, STEP_CLIPS = 2000, 4  # of the step whose memory is measured: clips of 20 s
FIGURES = ("character_error", "word_error", "jaccard", "cosine", "damerau", "loss")
PICTURES = {"similarities": "similarities by epoch", "losses": "losses by epoch", "looks": "attention of the decoder"}

# On two cores: an hour for both decoders, two hours, and ten minutes for each encoder.
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
    """Write a plot of all runs together, and those of each run."""
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
        f"{data['name']}: clips {data['sizes']}, {data['skipped']} skipped; test results of the best weights by "
        f"validation, seed {Config.seed}."
    )
    page = [f"# {title}, {today()}", machine(), described, table(made), *parts]
    records = [{"run": of, **series.results[0]} for of, series in (made | more).items()]
    write_page(name, "\n\n".join(page) + "\n", records)


def spelled(series: Series) -> str:
    clips = series.runs[0].read_json("looks.json")["clips"]
    return "\n".join(f"- {clip['wanted']!r} was transcribed as {clip['given']!r}" for clip in clips)


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
        "## An unseen speaker",
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
        f"Attention methods of the encoder, everything else equal: {Config.decoder} decoder, {SHORT['epochs']} epochs.",
        *by_epoch("speech_encoders", made)[:1],
        f"## A step with {STEP_CLIPS} clips of 20 s",
        "Forward and backward of the whole network in a new process; memory in addition to that before the step.",
        "\n".join(["| encoder | time | peak memory |", "|---|---:|---:|", *rows]),
    ]
    write("speech_encoders", "Linear attention in the encoder, spoken digits", made, parts)


def measured(method: str) -> dict[str, float]:
    """Measure time and memory of a step in a new process."""
    with get_context("spawn").Pool(1) as process:
        return process.apply(step, (method,))


def step(method: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = speech.make_model(Config(method=method))
    tokens = torch.randint(4, 35, (STEP_CLIPS, 90))

    def once(frames: int = STEP_FRAMES) -> None:
        sound, lengths = torch.randn(STEP_CLIPS, frames, 80), torch.full((STEP_CLIPS,), frames)
        model(sound, lengths, tokens).sum().backward()

    once(64)  # excludes torch's one-time setup
    return {"bytes": peak_bytes(once), "seconds": best_seconds(once, 3, 2.0)}


PARTS = {"numbers": numbers, "digits": digits, "ljspeech": ljspeech, "encoders": encoders}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech recognition benchmarks.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", help="folder of the clips; required except for numbers")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    options = parser.parse_args()
    if (options.data is None) != (options.part == "numbers"):
        parser.error("--data: expected a folder of clips; required for all parts except numbers")
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
