"""Scores of a decoder whose layers all use another attention rule, compared to exact attention.

    perplexity    exp(mean over tokens of -ln p(token | previous tokens)), of all tokens and of each quarter
    divergence    mean over positions of KL(p_exact || p) over the vocabulary, in nats
    agreement     share of positions where the most likely token is that of exact attention
    predicted     share of the answers' tokens that are the most likely ones

With a vocabulary of 49,152 tokens, a text of 8,192 tokens has 1.6 GB of logits. Therefore only the last hidden states
of all rules are kept; logits are computed for a few positions at a time, those of exact attention once for all rules.

Axes: n tokens, d width, w vocabulary.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import torch
from attention_rules import EXACT
from decoder import LOGIT_TOKENS, Attend, swapped
from recall_inputs import Sample
from torch import Tensor, nn

EVERYWHERE, PREFILL, DECODING = "everywhere", "prefill only", "decoding only"


@dataclass(frozen=True)
class TextScore:
    """One text by one rule."""

    text: str
    length: int
    rule: str
    perplexity: float
    quarters: tuple[float, ...]  # perplexity of each quarter
    divergence: float
    agreement: float


@dataclass(frozen=True)
class RecallScore:
    """The answers of one or more samples of a task, where one part of the sequence attends by a rule.

    Attributes:
        task: The name of the task.
        length: The length asked for.
        rule: The rule.
        where: Which queries follow it; the others attend exactly.
        tokens: The number of tokens predicted.
        predicted: The share of them that rank first.
        perplexity: Their perplexity.
        chance: The share that exact attention ranks first among unrelated answers; None if the task has none.
    """

    task: str
    length: int
    rule: str
    where: str
    tokens: int
    predicted: float
    perplexity: float
    chance: float | None = None

    @property
    def is_above_chance(self) -> bool:
        """Return whether the predicted share exceeds chance by two standard errors of chance."""
        if self.chance is None:
            return True
        share = (self.chance * self.tokens + 1) / (self.tokens + 2)  # never 0 or 1
        return self.predicted - self.chance > 2 * sqrt(share * (1 - share) / self.tokens)


@torch.no_grad()
def last_states(model: Any, tokens: Tensor, attend: Attend) -> Tensor:
    """Return the last hidden states (n, d) of a text."""
    with swapped(model, attend):
        return model.base_model(tokens, use_cache=False).last_hidden_state[0]


@torch.no_grad()
def score_text(model: Any, text: str, tokens: Tensor, states: Mapping[str, Tensor]) -> list[TextScore]:
    """Return the scores of all rules from their hidden states, those of exact attention among them."""
    target = tokens[0, 1:]
    losses: dict[str, list[Tensor]] = {rule: [] for rule in states}
    divergence, agreed = dict.fromkeys(states, 0.0), dict.fromkeys(states, 0)
    for start in range(0, len(target), LOGIT_TOKENS):
        part = slice(start, min(start + LOGIT_TOKENS, len(target)))
        exact = log_probabilities(model, states[EXACT][part])  # (n, w)
        for rule, of_rule in states.items():
            found = exact if rule == EXACT else log_probabilities(model, of_rule[part])
            losses[rule].append(-found.gather(1, target[part, None])[:, 0])
            divergence[rule] += float((exact.exp() * (exact - found)).sum())
            agreed[rule] += int((exact.argmax(1) == found.argmax(1)).sum())
    scores = []
    for rule in states:
        loss = torch.cat(losses[rule]).double()
        quarters = tuple(exp(float(part.mean())) for part in loss.tensor_split(4))
        count = len(target)
        scores.append(TextScore(text, tokens.shape[1], rule, exp(float(loss.mean())), quarters,
                                divergence[rule] / count, agreed[rule] / count))  # fmt: skip
    return scores


def log_probabilities(model: Any, states: Tensor) -> Tensor:
    """Return (n, w) from hidden states (n, d)."""
    return model.get_output_embeddings()(states).float().log_softmax(1)


@torch.no_grad()
def check_output_layer(model: Any) -> None:
    """Raise ValueError unless the logits are the output layer's product with the last hidden states."""
    tokens = torch.arange(8)[None]
    expected = model(tokens, use_cache=False).logits
    found = model.get_output_embeddings()(model.base_model(tokens, use_cache=False).last_hidden_state)
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(f"{type(model).__name__} changes its logits after the output layer, which is not supported")


def score_samples(
    model: nn.Module, length: int, samples: Sequence[tuple[Sample, Sample | None]], rules: Mapping[str, Attend]
) -> list[RecallScore]:
    """Return the scores of samples of one task together, for each rule and each part of the sequence.

    A context is processed once by each rule; its keys and values then serve all rules that process the tokens after it.

    Args:
        model: The model.
        length: The length asked for, for the record.
        samples: The samples of the task, each with its twin that has unrelated answers, if any.
        rules: All rules, exact attention among them.
    """
    exact, found, chance = rules[EXACT], defaultdict(list), []
    for sample, unrelated in samples:
        exact_context = process_context(model, sample, exact)
        if unrelated is not None:
            chance.append(score_answers(model, unrelated, exact_context, exact))
        found[EXACT, EVERYWHERE].append(score_answers(model, sample, exact_context, exact))
        for name, rule in rules.items():
            if name != EXACT:
                context = process_context(model, sample, rule)
                found[name, EVERYWHERE].append(score_answers(model, sample, context, rule))
                found[name, PREFILL].append(score_answers(model, sample, context, exact))
                found[name, DECODING].append(score_answers(model, sample, exact_context, rule))
    by_chance = float(torch.cat(chance, 1)[0].mean()) if chance else None
    scores = []
    for (name, where), parts in found.items():
        hits, losses = torch.cat(parts, 1).double()
        scores.append(RecallScore(samples[0][0].task, length, name, where, len(hits), float(hits.mean()),
                                  exp(float(losses.mean())), by_chance))  # fmt: skip
    return scores


@torch.no_grad()
def process_context(model: Any, sample: Sample, attend: Attend) -> Any:
    """Return a cache with the keys and values of the context."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with swapped(model, attend):
        model.base_model(sample.tokens[:, : sample.boundary], past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def score_answers(model: Any, sample: Sample, context: Any, attend: Attend) -> Tensor:
    """Return (2, answers): whether each token ranks first, and its loss. The cache is unchanged afterwards."""
    rest = sample.tokens[:, sample.boundary :]
    with swapped(model, attend):
        states = model.base_model(rest, past_key_values=context, use_cache=True).last_hidden_state[0]
    context.crop(-rest.shape[1])
    states, target = states[sample.answers - 1 - sample.boundary], sample.tokens[0, sample.answers]
    parts = []
    for rows, tokens in zip(states.split(LOGIT_TOKENS), target.split(LOGIT_TOKENS), strict=True):
        found = log_probabilities(model, rows)
        parts.append(torch.stack([(found.argmax(1) == tokens).float(), -found.gather(1, tokens[:, None])[:, 0]]))
    return torch.cat(parts, 1)
