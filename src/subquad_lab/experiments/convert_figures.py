"""What a run of `convert` shows: perplexity against tokens, and a table of all models."""

from subquad_lab.experiments.convert_config import Config
from subquad_lab.figures.plots import axes_of, by_factors, plain, svg
from subquad_lab.figures.tables import Table
from subquad_lab.training.run import Run

TABLE, DECODING = "conversion", "decoding"  # records of a run
UNTRAINED = " untrained"  # ends the names of models that are only evaluated
PUBLISHED = [
    {"what": "GPT-2, 125 million parameters, converted to Hedgehog and trained further (2024)", "data": "WikiText-103",
     "figure": 16.7},
]  # fmt: skip


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    """Plot the perplexity of each model against the tokens that it was trained on; dotted: models without training."""
    figure, (axes,) = axes_of(1)
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics():
        for name, value in line.items():
            if name.startswith("valid/") and name not in ("valid/perplexity", "valid/cross_entropy"):
                tokens = line["step"] * config.batch * config.context
                curves.setdefault(name.removeprefix("valid/"), []).append((tokens, value))
    for name, points in curves.items():
        if name.endswith(UNTRAINED) or len(points) == 1:
            axes.axhline(points[0][1], linestyle=":", color=f"C{len(axes.lines)}", label=plain(name))
        else:
            axes.plot(*zip(*points, strict=True), "--" if name.endswith("scratch") else "o-", markersize=3,
                      color=f"C{len(axes.lines)}", label=plain(name))  # fmt: skip
    axes.set(xlabel="tokens", ylabel="validation perplexity")
    by_factors(axes)
    if curves:
        axes.legend(fontsize="small")
    return {TABLE: svg(figure)}


def table(run: Run) -> Table | None:
    """Return perplexity, recall, state and speed of each model."""
    result = run.result()
    if result is None or not all(run.has(f"{name}.json") for name in (TABLE, DECODING)):
        return None
    probes, speeds = run.read_json(f"{TABLE}.json"), run.read_json(f"{DECODING}.json")
    exact, rows = result["test"]["exact"], []
    for name, own in probes["rows"].items():
        perplexity = result["test"][name]
        rows.append((
            name, f"{perplexity:,.4g}", f"{100 * (perplexity / exact - 1):+,.1f} %", f"{own['first_copy']:,.4g}",
            f"{own['second_copy']:,.4g}", f"{own['state_bytes'] / 1024:,.0f} KiB",
            f"{speeds['rows'][name]['tokens_per_second']:,.0f}",
        ))  # fmt: skip
    columns = ("model", "perplexity", "gap", "first copy", "second copy", f"state after {probes['tokens']}", "tokens/s")
    return Table(columns, rows, "perplexity of the test text, and of a text that is repeated once")
