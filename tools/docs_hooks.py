"""What MkDocs inserts into the pages of docs/ while it builds the site: make docs.

    <!-- commands -->                          every subcommand with its options, from the parser
    <!-- presets: language -->                 the presets of an experiment, from their YAML files
    <!-- published: language -->               figures of others, from the experiment
    <!-- results: sparse # Window | 8,192 -->  the table under the heading "Window" of the newest results of sparse.py;
                                               of its rows, those whose first cell is "8,192"
    $$ formula $$                              MathML

The results themselves are pages too, in results/.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands_reference
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.options.fields import presets

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Any, config: Any) -> Any:
    """Add the results of the benchmarks."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".svg"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert what the markers of a page name."""
    uri = page.file.src_uri
    if uri.startswith("results/"):
        page.meta["search"] = {"exclude": True}  # Numbers would drown everything else.
    folder = "../" * uri.count("/")
    try:
        return expanded(markdown, folder)
    except (KeyError, LookupError) as error:
        raise PluginError(f"{uri}: {error}") from error


def expanded(markdown: str, folder: str = "") -> str:
    """Return a page with everything inserted; `folder` leads from it to docs/."""
    inserted: dict[str, Callable[[str], str]] = {
        "commands": lambda _: commands_reference.section(),
        "presets": preset_table,
        "published": published_table,
        "results": lambda which: result_table(which, folder),
    }
    markdown = re.sub(
        r"^<!-- (\w+)(?:: (.*?))? -->$", lambda found: inserted[found[1]](found[2] or ""), markdown, flags=re.MULTILINE
    )
    markdown = re.sub(r"^\$\$\n(.*?)\n\$\$$", lambda found: formula(found[1]), markdown, flags=re.MULTILINE | re.DOTALL)
    return markdown.replace("../benchmarks/results/", "results/")


def formula(latex: str) -> str:
    return f'<div class="formula">{convert(latex, display="block")}</div>'


def preset_table(experiment: str) -> str:
    """Return a table of presets: the comment that opens each file, and its fields."""
    rows = ["| preset | what it is | fields |", "|---|---|---|"]
    for name, path in presets(EXPERIMENTS[experiment].name).items():
        lines = path.read_text().splitlines()
        comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        fields = ", ".join(f"`{line}`" for line in lines if not line.startswith("#"))
        rows.append(f"| `{name}` | {comment} | {fields} |")
    return "\n".join(rows)


def published_table(experiment: str) -> str:
    found = EXPERIMENTS[experiment].published
    rows = [f"| {entry['what']} | {entry['data']} | {entry['figure']} |" for entry in found]
    return "\n".join(["| published | data | figure |", "|---|---|---:|", *rows])


def newest(stem: str) -> Path:
    """Return the newest page of a benchmark."""
    found = [path for path in RESULTS.glob(f"{stem}_*.md") if re.fullmatch(rf"{stem}_[\d-]+", path.stem)]
    if not found:
        raise LookupError(f"no results of {stem} in {RESULTS}")
    return max(found, key=lambda path: path.stem)


def result_table(which: str, folder: str = "") -> str:
    """Return a table of a result page, with a link to it and the machine that was measured."""
    place, _, first_cells = which.partition(" | ")
    stem, _, heading = place.partition(" # ")
    path = newest(stem)
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if line.lstrip("# ").startswith(heading)), None)
    if start is None:
        raise LookupError(f"{path.name} has no heading {heading!r}")
    first = next(i for i in range(start, len(lines)) if lines[i].startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append(line)
    cells = tuple(f"| {cell} |" for cell in first_cells.split(" / ")) if first_cells else ("|",)
    rows = [row for row in table[2:] if row.startswith(cells)]
    if not rows:
        raise LookupError(f"{path.name}, {heading!r} has no row {first_cells!r}")
    machine = next(line for line in lines[1:] if "torch" in line).partition(", torch")[0]
    source = f"[{path.stem}]({folder}results/{path.name})"
    return "\n".join([*table[:2], *rows, "", f"*Measured: {source}, {machine}.*{{ .measured }}"])
