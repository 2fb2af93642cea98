"""The page of `recall.py`: tables of quality and recall."""

from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import fmean

from attention_rules import EXACT
from recall_curve import SEER_ATTENTION, CurvePoint
from recall_scores import DECODING, EVERYWHERE, PREFILL, RecallScore, TextScore

UNITS = """All layers use the rule; nothing is trained. All approximate rules have the same cost per query, that of \
{method}; the unit is one key read (a score and a weighted value), and a product with one summary vector costs half of \
it. The selection rules are simulated with masks. Their scan counts as cost, except for the oracle. *Blocks* are 16 \
neighboring keys, selected for each query; XAttention's blocks are 128 keys, selected for 128 queries together, so \
that a choice also depends on later queries. Keys of other blocks are dropped."""

WHERE = """A rule applies *everywhere*, to the queries of the context only (*prefill only*), or to the queries after \
it only (*decoding only*); the other queries attend exactly."""


def grid(corner: str, columns: Iterable[str], rows: dict[str, list[str]]) -> str:
    """Return a Markdown table."""
    columns = list(columns)
    lines = [[corner, *columns], ["---", *["---:"] * len(columns)], *([name, *row] for name, row in rows.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def progress(scores: Sequence[TextScore] | Sequence[RecallScore]) -> str:
    """Return one indented line per rule."""
    lines = []
    for rule in dict.fromkeys(score.rule for score in scores):
        mine = [score for score in scores if score.rule == rule]
        line = f"    {rule}: perplexity " + " / ".join(f"{score.perplexity:,.3f}" for score in mine)
        if isinstance(mine[0], TextScore):
            line += f", divergence {mine[0].divergence:.4f}, agreement {mine[0].agreement:.1%}"
        else:
            line += ", ranked first " + " / ".join(f"{score.predicted:.3f}" for score in mine)
        lines.append(line)
    return "\n".join(lines)


def perplexity_tables(scores: Sequence[TextScore], names: Sequence[str]) -> list[str]:
    """Return the sections on plain text, one per length, for the rules named."""
    parts = []
    for length in dict.fromkeys(score.length for score in scores):
        found = {(score.rule, score.text): score for score in scores if score.length == length}
        titles = list(dict.fromkeys(text for _, text in found))
        by_rule = {rule: [found[rule, text] for text in titles] for rule in names}
        whole = {rule: [score.perplexity for score in mine] for rule, mine in by_rule.items()}
        last = {rule: [score.quarters[-1] for score in mine] for rule, mine in by_rule.items()}
        near = {rule: [*map(nearness, mine), f"{fmean(score.divergence for score in mine):.4f} / "
                       f"{fmean(score.agreement for score in mine):.1%}"]
                for rule, mine in by_rule.items() if rule != EXACT}  # fmt: skip
        parts += [
            f"## Plain text, {length:,} tokens",
            "Perplexity, and its change relative to exact attention (geometric mean over the texts):",
            grid("rule", [*titles, "change"], with_change(whole)),
            f"Perplexity of the last {length // 4:,} tokens:",
            grid("rule", [*titles, "change"], with_change(last)),
            "Divergence from exact attention, KL in nats per token, and share of positions with the same top token:",
            grid("rule", [*titles, "mean"], near),
        ]
    return parts


def nearness(score: TextScore) -> str:
    return f"{score.divergence:.4f} / {score.agreement:.1%}"


def with_change(perplexities: dict[str, list[float]]) -> dict[str, list[str]]:
    """Return the cells of each rule, and last the geometric mean of the ratios to exact attention, minus 1."""
    cells = {}
    for rule, mine in perplexities.items():
        ratios = [log(a / b) for a, b in zip(mine, perplexities[EXACT], strict=True)]
        cells[rule] = [*(f"{perplexity:,.2f}" for perplexity in mine), f"{exp(fmean(ratios)) - 1:+.1%}"]
    return cells


def recall_tables(scores: Sequence[RecallScore], names: Sequence[str]) -> list[str]:
    """Return the sections on repeated text, copied tokens and generated tasks, for the rules named."""
    found = {(score.task, score.length, score.rule, score.where): score for score in scores}
    lengths = {task: list(dict.fromkeys(score.length for score in scores if score.task == task))
               for task in dict.fromkeys(score.task for score in scores)}  # fmt: skip
    parts = ["## Repeated text", f"Perplexity of the second copy. {WHERE}"]
    for length in lengths["repeated"]:
        rows = {}
        for rule in names:
            of_rule = [found.get(("repeated", length, rule, where)) for where in (EVERYWHERE, PREFILL, DECODING)]
            exact = found["repeated", length, EXACT, EVERYWHERE].perplexity
            rows[rule] = ["" if score is None else f"{score.perplexity:.3f} ({score.perplexity / exact - 1:+.1%})"
                          for score in of_rule]  # fmt: skip
        parts += [f"{length // 2:,} tokens, twice:", grid("rule", [EVERYWHERE, PREFILL, DECODING], rows)]
    columns = [f"{length:,} tokens" for length in lengths["copying"]]
    rows = {rule: [f"{found['copying', length, rule, EVERYWHERE].predicted:.3f}" for length in lengths["copying"]]
            for rule in names}  # fmt: skip
    parts += [
        "## Copied random tokens",
        "Random tokens, text, and the same random tokens again: share of the second copy ranked first.",
        grid("rule", columns, rows),
    ]
    return parts + task_tables(
        found, {task: of for task, of in lengths.items() if task not in ("repeated", "copying")}, names
    )


def task_tables(
    found: dict[tuple[str, int, str, str], RecallScore], lengths: dict[str, list[int]], names: Sequence[str]
) -> list[str]:
    """Return the section on generated tasks: those that exact attention solves above chance, and a list of the rest."""
    tasks = [(task, length) for task, of in lengths.items() for length in of]
    solved = [key for key in tasks if found[*key, EXACT, EVERYWHERE].is_above_chance]
    parts = [
        "## Generated tasks",
        "Similar to RULER: share of the answers' tokens ranked first, teacher-forced; rule everywhere / "
        "prefill only / decoding only. Chance is what exact attention scores on unrelated answers of the same form.",
    ]
    if solved:
        rows = {"tokens scored": [f"{found[*key, EXACT, EVERYWHERE].tokens:,}" for key in solved],
                "chance": [f"{found[*key, EXACT, EVERYWHERE].chance:.2f}" for key in solved]}  # fmt: skip
        for rule in names:
            places = [EVERYWHERE] if rule == EXACT else [EVERYWHERE, PREFILL, DECODING]
            rows[rule] = [" / ".join(f"{found[*key, rule, where].predicted:.2f}" for where in places) for key in solved]
        parts.append(grid("rule", [f"{task}, {length:,}" for task, length in solved], rows))
    for task, length in tasks:
        if (task, length) not in solved:
            score = found[task, length, EXACT, EVERYWHERE]
            parts.append(
                f"Not reported: {task} at {length:,} tokens. Exact attention ranks {score.predicted:.2f} of the "
                f"{score.tokens:,} tokens first, which is not above chance ({score.chance:.2f})."
            )
    return parts


def curve_section(points: Sequence[CurvePoint], picture: str) -> list[str]:
    """Return the section on quality by cost, with the published curve for comparison."""
    length = points[0].length
    rows = {
        point.rule: [f"{point.share:.1%}", f"{point.increase:+.1%}", f"{point.last_quarter:+.1%}",
                     f"{point.repeated:+.1%}", f"{point.predicted:.3f}"]
        for point in points
    }  # fmt: skip
    rows["exact"] = ["100.0%", "", "", "", f"{points[0].exact_predicted:.3f}"]
    published = {"increase of perplexity": [f"{increase:+.1%}" for increase in SEER_ATTENTION.values()]}
    return [
        f"## Quality by cost, {length:,} tokens",
        f"![quality by cost]({picture})",
        grid("setting", ["share of exact cost", "perplexity", "last quarter", "repeated text, perplexity",
                         "repeated text, ranked first"], rows),
        "Published results of SeerAttention for comparison, not measured here: an 8B model with *trained* gates, PG-19 "
        "at 8,192 tokens, by share of cost:",
        grid("SeerAttention (published)", [f"{share:.0%}" for share in SEER_ATTENTION], published),
    ]  # fmt: skip
