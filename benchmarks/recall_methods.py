"""Compare what each method recalls for the size of its state, and its perplexity in texts longer than its context.

    python benchmarks/recall_methods.py [--out runs/benchmark]

Finished runs are read, and interrupted runs are resumed.
"""

import argparse
from pathlib import Path

from results import FOLDER, machine, today, write_page

from subquad_lab.commands.compare import differences, verdicts
from subquad_lab.experiments import language, recall
from subquad_lab.experiments.positions import POSITIONS, perplexities, positions_picture
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.training.seeds import Series, train

POSITION_METHODS = ("exact", "window:64", "linear:elu", "taylor:2")
SMALL = dict(width=64, epochs=2)  # of the preset `long`, so that a model takes minutes


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall by state size, and perplexity by position.")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    out = parser.parse_args().out
    quick = config_from(recall.EXPERIMENT, read(presets("recall")["quick"]), "quick")
    done = {name: train(recall.EXPERIMENT, config, out / f"recall-{name.replace(':', '-').replace(' ', '-')}")
            for name, config in recall.variants(quick).items()}  # fmt: skip
    values = read(presets("language")["long"]) | SMALL
    trained = {
        method: train(language.EXPERIMENT, config_from(language.EXPERIMENT, values | {"method": method}, "long"),
                      out / f"positions-{method.replace(':', '-')}")
        for method in POSITION_METHODS
    }  # fmt: skip
    pictures = recall.shared_pictures({name: series.runs for name, series in done.items()})
    pictures |= positions_picture({name: series.runs for name, series in trained.items()})
    for name, picture in pictures.items():
        (FOLDER / f"recall_methods_{name}_{today()}.svg").write_bytes(picture)
    records = [{"run": f"{name}/{run.name}", **run.about(), **result}
               for name, series in (done | trained).items()
               for run, result in zip(series.runs, series.results, strict=True)]  # fmt: skip
    write_page("recall_methods", "\n\n".join([*recall_page(done), *positions_page(trained)]) + "\n", records)


def recall_page(done: dict[str, Series]) -> list[str]:
    figures = [figure for figure in done["exact"].results[0]["test"] if figure != "accuracy"]
    data, measure = done["exact"].runs[0].about()["data"], recall.EXPERIMENT.measure
    rows = [
        (name, f"{series.runs[0].about()['state_bytes']:,}", series.shown("test", measure),
         *(series.shown("test", figure) for figure in figures))
        for name, series in done.items()
    ]  # fmt: skip
    columns = "method", "state, bytes", "accuracy", *(f.removeprefix("accuracy_").replace("_", " ") for f in figures)
    return [
        f"# Recall and longer contexts, {today()}",
        machine(),
        "## Accuracy by method",
        f"`subquad compare recall --preset quick`: {data['length']} tokens, a vocabulary of {data['vocabulary']}, one "
        f"layer, {len(done['exact'].runs)} seeds; mean and 95 % confidence interval over seeds.",
        markdown(columns, rows),
        f"![accuracy against state size and pairs](recall_methods_recall_{today()}.svg)",
        "\n".join(f"- {line}" for line in verdicts(done, measure, differences(done, measure))),
    ]


def positions_page(trained: dict[str, Series]) -> list[str]:
    found = {name: perplexities(series.runs[0].read_json(f"{POSITIONS}.json")) for name, series in trained.items()}
    intervals = [f"{a:,} to {b - 1:,}" for a, b, _ in next(iter(found.values()))]
    rows = [(name, *(f"{perplexity:.1f}" for _, _, perplexity in each)) for name, each in found.items()]
    data = trained["exact"].runs[0].about()["data"]
    return [
        "## Perplexity by position",
        f"A short training of `subquad train language --preset long --width {SMALL['width']} --epochs "
        f"{SMALL['epochs']} --method METHOD` on {data['name']}, context 256, rotary positions, one seed; test "
        "perplexity of the words at these positions.",
        markdown(("method", *intervals), rows),
        f"![perplexity by position](recall_methods_{POSITIONS}_{today()}.svg)",
    ]


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (columns, ("---", *["---:"] * (len(columns) - 1)), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
