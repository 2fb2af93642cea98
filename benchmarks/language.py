"""Word language models on the Penn Treebank: recurrent models, and attention methods at equal budget.

    python benchmarks/language.py --data PTB [--out runs/benchmark] [--parts rnn,lstm,attention,speed] [--seeds 2]

Each part is a set of runs of `subquad train language --preset ...`. Finished runs are read, and interrupted runs are
resumed. `speed` measures words per second at context 4,096. Recurrent models and attention have a page each, which
shows all finished runs.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from results import FOLDER, machine, today, write_page

from subquad_lab.experiments import language
from subquad_lab.experiments.language import METHODS, Config
from subquad_lab.experiments.stored import trained
from subquad_lab.figures.plots import compared
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.system.timing import best_seconds
from subquad_lab.training import seeds, snapshot
from subquad_lab.training.run import ABOUT, RESULT, Run

PROMPT, SENTENCES = "in palo alto", 5
SPEED_CONTEXT = 4096  # words
COLUMNS = "| run | command | parameters | epochs | threads | training | words/s | validation | test |"
RULE = "|---|---|---:|---:|---:|---:|---:|---:|---:|"
PAGES = (
    ("Recurrent word language models", ["rnn", "lstm"], "language"),
    ("Attention methods in a word language model", ["attention", "speed"], "language_attention"),
)


def preset(name: str, data: str) -> Config:
    config = config_from(language.EXPERIMENT, read(presets("language")[name]), name)
    assert isinstance(config, Config)
    return replace(config, data=data)


def planned(parts: list[str], data: str, seeds: int) -> dict[str, tuple[str, Config]]:
    """Return the names of runs, with the options of each."""
    found = {}
    for part in ("rnn", "lstm"):
        if part in parts:
            found[f"ptb-{part}"] = f"--preset {part}", preset(part, data)
    for seed in range(seeds) if "attention" in parts else ():
        for method in METHODS:
            config = replace(preset("attention", data), method=method, seed=seed)
            name = f"ptb-{method.replace(':', '-')}-{seed}"
            found[name] = f"--preset attention --method {method} --seed {seed}", config
    return found


def train(name: str, config: Config, out: Path) -> None:
    seeds.train(language.EXPERIMENT, config, out / name)


def line(name: str, options: str, run: Run) -> str:
    result, about = run.read_json(RESULT), run.read_json(ABOUT)
    speed, total = result["words_per_second"], about["parameters"]["total"]
    values = " | ".join(f"{result[part]['perplexity']:.1f}" for part in ("valid", "test"))
    return (
        f"| {name} | `subquad train language {options} --data ptb` | {total:,} | {result['epochs']:.1f} | "
        f"{about['versions']['threads']} | "
        f"{result['seconds'] / 60:.1f} min | {speed:,.0f} | {values} |"
    )


def speeds(data: str) -> dict[str, tuple[float, float]]:
    """Return words per second at a long context, in training and in inference."""
    found = {}
    for method in METHODS:
        config = replace(preset("attention", data), method=method, context=SPEED_CONTEXT, batch=1)
        snapshot.seed_all(0)
        task = language.build(config)
        rows = task.batch(0, 0)

        def step(task: language.Language = task, rows: language.Rows = rows) -> None:
            task.loss(task.model, rows, {})[0].backward()

        def read_only(task: language.Language = task, rows: language.Rows = rows) -> None:
            with torch.no_grad():
                task.model(rows[0], None)

        found[method] = SPEED_CONTEXT / best_seconds(step, 3, 5.0), SPEED_CONTEXT / best_seconds(read_only, 3, 3.0)
        print(method, found[method], flush=True)
    return found


def write(
    title: str, name: str, known: dict[str, tuple[str, Config]], options: argparse.Namespace, speed: bool
) -> None:
    """Return a page about all finished runs in `known`."""
    done = {run: Run(options.out / run) for run in known if (options.out / run / RESULT).is_file()}
    page = [f"# {title} on the Penn Treebank, {today()}", machine()]
    results = {run: done[run].read_json(RESULT) for run in done}
    if done:
        page.append(f"![validation perplexity]({name}_{today()}.svg)")
        page.append("\n".join([COLUMNS, RULE, *(line(run, known[run][0], done[run]) for run in done)]))
    if speed:
        rows = [f"| {method} | {a:,.0f} | {b:,.0f} |" for method, (a, b) in speeds(options.data).items()]
        page.append(f"## Words per second at context {SPEED_CONTEXT:,}")
        page.append("\n".join(["| method | training | inference |", "|---|---:|---:|", *rows]))
    if done:
        best = min(done, key=lambda run: results[run]["test"]["perplexity"])
        task = trained(done[best].folder)[1]
        page.append(f"## Sentences of {best}, temperature 1")
        page.append("\n".join(f"- {task.sample(PROMPT, 40, 1.0, None, None, seed)}" for seed in range(SENTENCES)))
        (FOLDER / f"{name}_{today()}.svg").write_bytes(
            compared({run: [done[run]] for run in done}, language.EXPERIMENT)
        )
    write_page(name, "\n\n".join(page) + "\n", [{"run": run, **result} for run, result in results.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Word language models on the Penn Treebank.")
    parser.add_argument("--data", required=True, help="folder with ptb.{train,valid,test}.txt")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--parts", default="rnn,lstm,attention,speed")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    parts = options.parts.split(",")
    for name, (_, config) in planned(parts, options.data, options.seeds).items():
        train(name, config, options.out)
    for title, of, name in PAGES:
        if any(part in parts for part in of):
            write(title, name, planned(of, options.data, options.seeds), options, "speed" in parts and "speed" in of)


if __name__ == "__main__":
    main()
