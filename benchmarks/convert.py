"""Write the page of conversions from runs of `subquad train convert`, finished or not.

    python benchmarks/convert.py runs/convert-001 runs/convert-002

For each run: the options that differ from the defaults, the table of a finished run, and validation perplexity against
tokens. Of a model only the file name is written.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from results import FOLDER, machine, today, write_page

from subquad_lab.experiments import convert
from subquad_lab.experiments.convert_config import Config
from subquad_lab.options.fields import config_from, read
from subquad_lab.training.run import CONFIG, Run


def main() -> None:
    parser = argparse.ArgumentParser(description="Write benchmarks/results/ from runs of `subquad train convert`.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parts, records = [f"# Conversion, {today()}", machine()], []
    for number, folder in enumerate(parser.parse_args().runs, 1):
        run, config = opened(folder)
        picture = f"convert_{number}_{today()}.svg"
        (FOLDER / picture).write_bytes(convert.EXPERIMENT.pictures(run, config)[convert.TABLE])
        parts += section(run, config, picture)
        curve = [line for line in run.metrics() if "valid/perplexity" in line]
        records.append({"options": options(config), **run.about(), "result": run.result(), "curve": curve})
    write_page("convert", "\n\n".join(parts) + "\n", records)


def opened(folder: Path) -> tuple[Run, Config]:
    run, values = Run.open(folder), read(folder / CONFIG)
    values.pop("experiment", None)
    return run, config_from(convert.EXPERIMENT, values, folder / CONFIG)


def options(config: Config) -> dict[str, Any]:
    """Return the options that differ from the defaults, without folders."""
    defaults = asdict(Config())
    found = {name: value for name, value in asdict(config).items() if value != defaults[name]}
    return found | {name: Path(found[name]).name for name in Config.paths if found.get(name)}


def section(run: Run, config: Config, picture: str) -> list[str]:
    """Return the parts of the page about a run."""
    model = "A small Transformer" if config.model is None else Path(config.model).stem
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options(config).items())
    data, result = run.about()["data"], run.result()
    parts = [f"## {model}", f"`subquad train convert {given}`, seed {config.seed}; text: {data['name']}."]
    found = convert.EXPERIMENT.table(run)
    if found is None:
        parts.append("This run has not finished, so it has no test perplexity.")
    else:
        assert result is not None
        parts += [f"Test, after {result['steps']:,} steps: {found.title}.", markdown(found.columns, found.rows)]
    return [*parts, f"### {model}: validation perplexity against tokens", *curves(run, config),
            f"![validation perplexity against tokens]({picture})"]  # fmt: skip


def curves(run: Run, config: Config) -> list[str]:
    """Return a table with a row for each evaluation; models without training are in one of them only."""
    lines = [line for line in run.metrics() if "valid/perplexity" in line]
    names = list(dict.fromkeys(name for line in lines for name in line if name.startswith("valid/")))
    names.remove("valid/perplexity")
    rows = [(f"{line['step'] * config.batch * config.context:,}",
             *(f"{line[name]:.4g}" if name in line else "" for name in names)) for line in lines]  # fmt: skip
    return [markdown(("tokens", *(name.removeprefix("valid/") for name in names)), rows)]


def markdown(columns: Any, rows: Any) -> str:
    lines = (columns, ("---", *["---:"] * (len(columns) - 1)), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
