"""Inputs whose end can be predicted only from distant tokens: repeated text, copied tokens, and generated questions.

    repeated             n / 2 tokens of text, then the same again
    copying              random tokens, text, the same random tokens again
    needle               one fact in a long text, and a question about it
    multi-key            many facts of one form, and questions about some of them
    multi-value          several facts about one thing, and a question about all of them
    variable tracking    chains of assignments, and a question about all variables with one value
    word count           a list of words, and a question about the most common ones

The last five follow the tasks of RULER (Hsieh et al., 2024) with different wording. Answers are teacher-forced: the
share of their tokens that the model ranks first is the score. Each question also has an unrelated answer of the same
form; the score that exact attention has on it is the level of chance.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COPIED = 512  # random tokens, at most a quarter of the whole
THINGS = [
    "otter",
    "falcon",
    "lantern",
    "harbor",
    "walnut",
    "violin",
    "glacier",
    "pepper",
    "saddle",
    "copper",
    "ribbon",
    "meadow",
    "anchor",
    "beetle",
    "candle",
    "desert",
    "engine",
    "feather",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "magnet",
    "needle",
    "orchard",
    "pillow",
    "quartz",
    "rocket",
    "silver",
    "temple",
]
KEYS, ASKED, VALUES, CHAINS, HOPS, COMMON = 16, 4, 4, 3, 3, 3
ROUNDS = 512  # of the list of words: more than any length holds; the list is cut


@dataclass(frozen=True)
class Sample:
    """Tokens of which some, after a context, are answers.

    Attributes:
        task: What the sample tests.
        tokens: (1, n).
        boundary: The number of tokens of the context.
        answers: Positions of the tokens to predict; each follows a token after the boundary.
    """

    task: str
    tokens: Tensor
    boundary: int
    answers: Tensor


@dataclass(frozen=True)
class Question:
    """A question about a context, its answer, and an answer of the same form that the context does not give."""

    prompt: str
    answer: Sequence[str]
    unrelated: Sequence[str]


@dataclass(frozen=True)
class Task:
    """Facts to hide in a text, in order, each as pieces that are tokenized separately; and what is asked about them."""

    facts: list[list[str]]
    questions: list[Question]
    is_hidden: bool = True  # whether text lies between the facts; otherwise the facts follow one another


def repeated(text: Tensor, length: int) -> Sample:
    """Return the first half of `length` tokens of a text, twice."""
    half = length // 2
    return Sample("repeated", text[:, :half].repeat(1, 2), half, torch.arange(half + 1, 2 * half))


def copying(text: Tensor, length: int, vocabulary: Sequence[int], seed: int) -> Sample:
    """Return random tokens of a vocabulary, text, and the same random tokens, `length` in all."""
    count = min(COPIED, length // 4)
    chosen = torch.tensor(random.Random(seed).choices(vocabulary, k=count))[None]
    tokens = torch.cat([chosen, text[:, : length - 2 * count], chosen], 1)
    boundary = length - count
    return Sample("copying", tokens, boundary, torch.arange(boundary + 1, length))


def question_pair(
    name: str, tokenizer: Callable[..., Any], text: Tensor, length: int, seed: int
) -> tuple[Sample, Sample]:
    """Return a sample of a generated task, and the same with unrelated answers.

    Args:
        name: A key of `TASKS`.
        tokenizer: The tokenizer of the model.
        text: (1, at least `length`), in which the facts are hidden.
        length: The number of tokens, approximately; at most this many.
        seed: Determines names, numbers and their places.
    """
    encode = lambda piece: tokenizer(piece, add_special_tokens=False).input_ids
    draw = random.Random(f"{name} {seed}")
    task = TASKS[name](draw)
    facts = [[token for piece in fact for token in encode(piece)] for fact in task.facts]
    endings = [_ending(task.questions, encode, related) for related in (True, False)]
    room = length - max(len(tokens) for tokens, _ in endings)
    if task.is_hidden:
        context = _hide(facts, text[0].tolist(), room, draw)
    else:
        context = [token for fact in facts for token in fact][:room]
    true, unrelated = (
        Sample(name, torch.tensor([context + tokens]), len(context), torch.tensor(answers) + len(context))
        for tokens, answers in endings
    )
    return true, unrelated


def _ending(
    questions: list[Question], encode: Callable[[str], list[int]], related: bool
) -> tuple[list[int], list[int]]:
    """Return the tokens of all questions and answers, and the positions of the answers' tokens among them."""
    tokens: list[int] = []
    answers: list[int] = []
    for question in questions:
        tokens += encode(question.prompt)
        for number, part in enumerate(question.answer if related else question.unrelated):
            tokens += encode("," if part.startswith(" ") else ", ") if number else []
            found = encode(part)
            answers += range(len(tokens), len(tokens) + len(found))
            tokens += found
    return tokens, answers


def _hide(facts: list[list[int]], text: list[int], room: int, draw: random.Random) -> list[int]:
    """Return `room` tokens: the text, with the facts in order at random places."""
    count = room - sum(map(len, facts))
    if count < len(facts):
        raise ValueError(f"length: the facts and questions leave {count} tokens for text; use a larger length")
    cuts = [0, *sorted(draw.randrange(count) for _ in facts), count]
    tokens: list[int] = []
    for number, fact in enumerate(facts):
        tokens += text[cuts[number] : cuts[number + 1]] + fact
    return tokens + text[cuts[-2] : count]


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))


def _fact(thing: str, number: str) -> list[str]:
    return [f"\nThe secret number of the {thing} is ", number, ".\n"]


def needle(draw: random.Random) -> Task:
    thing, number = draw.choice(THINGS), _number(draw)
    prompt = f"\nQuestion: what is the secret number of the {thing}?\nAnswer: The secret number of the {thing} is "
    return Task([_fact(thing, number)], [Question(prompt, [number], [_number(draw)])])


def multi_key(draw: random.Random) -> Task:
    """Ask for the numbers of some things; unrelated are those of other things of the context."""
    numbers = {thing: _number(draw) for thing in draw.sample(THINGS, KEYS)}
    drawn = draw.sample(list(numbers), 2 * ASKED)
    questions = [
        Question(f"\nThe secret number of the {thing} is ", [numbers[thing]], [numbers[other]])
        for thing, other in zip(drawn[:ASKED], drawn[ASKED:], strict=True)
    ]
    return Task([_fact(thing, number) for thing, number in numbers.items()], questions)


def multi_value(draw: random.Random) -> Task:
    """Ask for all numbers of one thing, in order; unrelated are numbers that the context does not contain."""
    thing, numbers = draw.choice(THINGS), [_number(draw) for _ in range(2 * VALUES)]
    facts = [[f"\nOne secret number of the {thing} is ", number, ".\n"] for number in numbers[:VALUES]]
    return Task(facts, [Question(f"\nThe secret numbers of the {thing} are ", numbers[:VALUES], numbers[VALUES:])])


def variable_tracking(draw: random.Random) -> Task:
    """Ask for the variables with one value; unrelated are those with another one."""
    names = iter(draw.sample([f"{a}{b}" for a in "ABCDEFGH" for b in "JKLMNPQR"], CHAINS * (HOPS + 1)))
    chains = [[next(names) for _ in range(HOPS + 1)] for _ in range(CHAINS)]
    values = [_number(draw) for _ in chains]
    facts = [["\nVAR ", chain[0], " = ", value, "\n"] for chain, value in zip(chains, values, strict=True)]
    facts += [["\nVAR ", chain[hop + 1], " = VAR ", chain[hop], "\n"] for hop in range(HOPS) for chain in chains]
    prompt = f"\nThe variables that have the value {values[0]} are "
    return Task(facts, [Question(prompt, chains[0], chains[1])])


def word_count(draw: random.Random) -> Task:
    """Ask for the most common words of a list, most common first; unrelated are rare ones.

    The list is made of shuffled rounds, each with the same counts, so that cutting it keeps the order of the words.
    """
    words = draw.sample(THINGS, 2 * COMMON + 10)
    common, rare = words[:COMMON], words[COMMON : 2 * COMMON]
    one_round = words + [word for rank, word in enumerate(common) for _ in range(7 - 2 * rank)]
    facts = [["List of words:"]]
    for _ in range(ROUNDS):
        draw.shuffle(one_round)
        facts += [[f" {word}"] for word in one_round]
    prompt = f"\nThe {COMMON} most common words in the list are"
    return Task(facts, [Question(prompt, [f" {word}" for word in common], [f" {word}" for word in rare])], False)


TASKS: dict[str, Callable[[random.Random], Task]] = {
    "needle": needle,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "variable tracking": variable_tracking,
    "word count": word_count,
}
