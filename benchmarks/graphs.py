"""Compare self-loops, normalization and attention in a graph network on a citation graph.

    python benchmarks/graphs.py --data FOLDER [--out runs/benchmark] [--seeds 10]

Finished runs are read, and interrupted runs are resumed.
"""

import argparse
import shutil
from pathlib import Path

from results import FOLDER, machine, today, write_page

from subquad_lab.commands.compare import COLUMNS, cells, differences, verdicts
from subquad_lab.experiments import graphs
from subquad_lab.figures.plots import compared
from subquad_lab.training.seeds import train

PICTURES = {"norms": "norms of the features after k propagations", "embedding": "hidden layer of the first seed"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Graph networks on a citation graph.")
    parser.add_argument("--data", required=True, help="folder with Planetoid files, or an npz file")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    configs = graphs.variants(graphs.Config(data=options.data, seeds=options.seeds))
    done = {name: train(graphs.EXPERIMENT, config, options.out / f"graphs-{name.replace(' ', '-')}")
            for name, config in configs.items()}  # fmt: skip
    (first, *_), measure = done, graphs.EXPERIMENT.measure
    data = done[first].runs[0].about()["data"]
    rows = [cells(name, series, graphs.EXPERIMENT) for name, series in done.items()]
    page = [
        f"# Graph networks on {data['name']}, {today()}",
        machine(),
        f"{data['nodes']:,} nodes, {data['edges']:,} edges, {data['features']:,} features, {data['classes']} classes, "
        f"split {data['sizes']}. `subquad compare graphs --data FOLDER --seeds {options.seeds}`, best validation "
        "weights; "
        + "; ".join(f"published, {line['data']}: {line['what']} {line['figure']}" for line in graphs.PUBLISHED),
        f"![training loss and validation accuracy](graphs_{today()}.svg)",
        "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)),
        "\n".join(f"- {line}" for line in verdicts(done, measure, differences(done, measure))),
    ]  # fmt: skip
    (FOLDER / f"graphs_{today()}.svg").write_bytes(
        compared({name: series.runs for name, series in done.items()}, graphs.EXPERIMENT)
    )
    for name, what in PICTURES.items():
        shutil.copyfile(done[first].runs[0].folder / f"{name}.svg", FOLDER / f"graphs_{name}_{today()}.svg")
        page.append(f"![{what}](graphs_{name}_{today()}.svg)")
    records = [{"run": f"{name}/{run.name}", **result} for name, series in done.items()
               for run, result in zip(series.runs, series.results, strict=True)]  # fmt: skip
    write_page("graphs", "\n\n".join(page) + "\n", records)


if __name__ == "__main__":
    main()
