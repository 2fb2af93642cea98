"""Perplexity and recall by cost, for several values of `Multipole.top`, with published results for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from attention_rules import EXACT
from budget import share_of_exact
from recall_scores import EVERYWHERE, RecallScore, TextScore

from subquad import Multipole

# Published, not measured here: an 8B model on PG-19 at 8,192 tokens, with gates trained to select blocks.
SEER_ATTENTION = {0.5: 0.001, 0.4: 0.003, 0.3: 0.006, 0.2: 0.016, 0.1: 0.058}  # share of work: increase of perplexity


@dataclass(frozen=True)
class CurvePoint:
    """One setting. Increases are relative to exact attention: geometric means over texts, minus 1.

    Attributes:
        rule: The setting.
        top: Its number of blocks read key by key.
        length: The number of tokens.
        share: Its cost as a fraction of that of exact attention.
        increase: Increase of the perplexity of plain texts.
        last_quarter: The same for the last quarter of each text.
        repeated: Increase of the perplexity of the second half of repeated texts.
        predicted: Share of the tokens of the second half that rank first.
        exact_predicted: The same for exact attention.
    """

    rule: str
    top: int
    length: int
    share: float
    increase: float
    last_quarter: float
    repeated: float
    predicted: float
    exact_predicted: float


def curve(
    settings: Sequence[Multipole], length: int, texts: Sequence[TextScore], recalls: Sequence[RecallScore]
) -> list[CurvePoint]:
    """Return the points of the settings from scores at one length, by increasing cost."""
    of_texts = {(score.rule, score.text): score for score in texts if score.length == length}
    names = list(dict.fromkeys(text for _, text in of_texts))
    again = {score.rule: score for score in recalls
             if (score.task, score.length, score.where) == ("repeated", length, EVERYWHERE)}  # fmt: skip

    def increase(rule: str, last: bool) -> float:
        of = lambda score: score.quarters[-1] if last else score.perplexity
        return exp(fmean(log(of(of_texts[rule, text]) / of(of_texts[EXACT, text])) for text in names)) - 1

    points = []
    for method in settings:
        rule = method.label
        points.append(CurvePoint(
            rule, method.top, length, share_of_exact(method, length), increase(rule, False), increase(rule, True),
            again[rule].perplexity / again[EXACT].perplexity - 1, again[rule].predicted, again[EXACT].predicted,
        ))  # fmt: skip
    return sorted(points, key=lambda point: point.share)


def draw(points: Sequence[CurvePoint]) -> bytes:
    """Return an SVG: increase of perplexity on the left, recall of repeated text on the right."""
    from matplotlib.ticker import PercentFormatter

    from subquad_lab.figures.plots import axes_of, svg

    figure, (left, right) = axes_of(2)
    shares = [point.share for point in points]
    left.plot(shares, [point.increase for point in points], "o-", label="Multipole, all tokens")
    left.plot(shares, [point.last_quarter for point in points], "o--", label="Multipole, last quarter")
    left.plot(*zip(*SEER_ATTENTION.items(), strict=True), "s:", color="0.5", label="SeerAttention 8B (published)")
    left.axhline(0, color="0.5", linewidth=0.8)
    left.set(xlabel="share of the cost of exact attention", ylabel="increase of perplexity", xlim=(0, None))
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.legend(fontsize="small")
    right.plot(shares, [point.predicted for point in points], "o-", label="Multipole")
    right.axhline(points[0].exact_predicted, color="0.5", linewidth=0.8, label="exact attention")
    right.set(xlabel="share of the cost of exact attention", ylabel="repeated tokens ranked first", xlim=(0, None))
    right.legend(fontsize="small")
    return svg(figure)
