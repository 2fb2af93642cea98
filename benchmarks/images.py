"""Compare pooling and strides on real images: a sweep of learning rates, five seeds of each, and Fashion-MNIST.

    python benchmarks/images.py --medmnist pneumoniamnist.npz --fashion FOLDER [--out runs/benchmark]

The sweep and Fashion-MNIST use the published recipe (`--preset published`), the comparison uses `--preset sound`.
Finished runs are read, and interrupted runs are resumed.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from results import FOLDER, machine, today, write_page

from subquad_lab.commands.compare import differences, verdicts
from subquad_lab.experiments import images
from subquad_lab.figures.plots import compared
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.training.run import ABOUT
from subquad_lab.training.seeds import Series, train

RATES = (0.1, 0.01, 0.001)
SEEDS = 5
FIGURES = "| {} | parameters | epochs | training | validation accuracy | test accuracy | cross-entropy |"
RULE = "|---|---:|---:|---:|---:|---:|---:|"


def line(name: str, series: Series) -> str:
    about = series.runs[0].read_json(ABOUT)
    epochs, seconds = (fmean(each[what] for each in series.results) for what in ("epochs", "seconds"))
    return (
        f"| {name} | {about['parameters']['total']:,} | {epochs:.1f} | {seconds / 60:.1f} min | "
        f"{series.shown('valid', 'accuracy')} | {series.shown('test', 'accuracy')} | "
        f"{series.shown('test', 'cross_entropy')} |"
    )


def rates(data: str, name: str, out: Path) -> tuple[list[str], list[Series]]:
    """Train the published recipe at each learning rate; return a table and a plot."""
    base = replace(config_from(images.EXPERIMENT, read(presets("images")["published"]), "published"), data=data)
    made = {f"rate {rate:g}": train(images.EXPERIMENT, replace(base, lr=rate), out / f"{name}-lr-{rate:g}")
            for rate in RATES}  # fmt: skip
    picture = f"images_{name}_{today()}.svg"
    (FOLDER / picture).write_bytes(compared({rate: series.runs for rate, series in made.items()}, images.EXPERIMENT))
    sizes = next(iter(made.values())).runs[0].about()["data"]["sizes"]
    page = [
        f"## {name}: the published recipe at three learning rates",
        f"`subquad sweep images --preset published --grid.lr 0.1,0.01,0.001`, images {sizes}, seed 42, last weights.",
        f"![training loss and validation accuracy]({picture})",
        "\n".join([FIGURES.format("rate"), RULE, *(line(rate, series) for rate, series in made.items())]),
    ]
    return page, list(made.values())


def downsampling(data: str, name: str, out: Path) -> tuple[list[str], list[Series]]:
    """Compare pooling and strides with five seeds."""
    measure = images.EXPERIMENT.measure
    found = images.variants(images.Config(data=data, seeds=SEEDS))
    made = {how: train(images.EXPERIMENT, config, out / f"{name}-{how}") for how, config in found.items()}
    picture = f"images_{name}_downsampling_{today()}.svg"
    (FOLDER / picture).write_bytes(compared({how: series.runs for how, series in made.items()}, images.EXPERIMENT))
    page = [
        f"## {name}: pooling and strides, {SEEDS} seeds",
        f"`subquad compare images --seeds {SEEDS}`: best weights by validation, 95 % confidence intervals over seeds.",
        f"![training loss and validation accuracy]({picture})",
        "\n".join([FIGURES.format("halved by"), RULE, *(line(how, series) for how, series in made.items())]),
        "\n".join(f"- {line}" for line in verdicts(made, measure, differences(made, measure))),
    ]
    return page, list(made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pooling and strides on real images.")
    parser.add_argument("--medmnist", help="a MedMNIST npz file")
    parser.add_argument("--fashion", help="folder with Fashion-MNIST's *-ubyte files")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    options = parser.parse_args()
    page, records = [f"# Pooling and strides, {today()}", machine()], list[dict[str, Any]]()
    parts = []
    if options.medmnist:
        name = Path(options.medmnist).stem
        parts += [rates(options.medmnist, name, options.out), downsampling(options.medmnist, name, options.out)]
    if options.fashion:
        parts.append(rates(options.fashion, "fashion-mnist", options.out))
    for text, made in parts:
        page += text
        for series in made:
            records += [{"run": f"{series.folder.name}/{run.name}", **result} for run, result in
                        zip(series.runs, series.results, strict=True)]  # fmt: skip
    write_page("images", "\n\n".join(page) + "\n", records)


if __name__ == "__main__":
    main()
