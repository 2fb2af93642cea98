"""Text for language models, split into three parts, with a vocabulary from the training part.

    embedded     the documentation topics that come with Python, split by topic; paragraphs of several topics count once
    a folder     ptb.{train,valid,test}.txt (Penn Treebank), wiki.{train,valid,test}.tokens (WikiText), or
                 {train,valid,test}.txt: words separated by spaces, one sentence per line
                 otherwise all *.txt, *.md and *.rst files, split by file

Each sentence, or paragraph of plain text, ends with <eos>; words outside the vocabulary are <unk>. Tokens are words, or
the characters of sentences or paragraphs, with a single space for each run of white space.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import read_regular
from subquad_lab.system.text import warn

PARTS = ("train", "valid", "test")
EMBEDDED = "Python's documentation topics"
MIN_SPLIT_TEXTS = 20  # Fewer are split by words.
UNKNOWN, END = "<unk>", "<eos>"
NAMES = {
    "Penn Treebank": "ptb.{}.txt",
    "WikiText": "wiki.{}.tokens",
    "text in three parts": "{}.txt",
}
PTB_MD5 = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
SUFFIXES = (".txt", ".md", ".rst")
Tokens = Literal["words", "characters"]
Split = Callable[[str], list[str]]
MIN_WORD_COUNT = 2  # Rarer words of plain text are unknown; prepared texts contain their own <unk>.


@dataclass(frozen=True)
class Prose:
    """The text of each part, as it is."""

    name: str
    checksum: str  # SHA-256 of all parts
    parts: dict[str, str]


@dataclass(frozen=True)
class Corpus:
    """The word numbers of each part; words[i] is the word, or character, with number i."""

    name: str
    checksum: str  # SHA-256 of all words
    words: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor
    tokens: Tokens = "words"

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def split(self, text: str) -> list[str]:
        """Split a text into words, at spaces if all words are then known and otherwise as plain text; or characters."""
        if self.tokens == "characters":
            return characters_of(text)
        words = text.split()
        return words if all(word in self.numbers for word in words) else words_of(text)

    def text(self, numbers: Iterable[int]) -> str:
        return (" " if self.tokens == "words" else "").join(self.words[i] for i in numbers)


def words_of(text: str) -> list[str]:
    """Return lower-case words, numbers and punctuation."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def characters_of(text: str) -> list[str]:
    return list(" ".join(text.split()))


def load_text(folder: str | None = None, tokens: Tokens = "words") -> Corpus:
    """Load the embedded text, or text from a folder."""
    plain, prepared = (words_of, str.split) if tokens == "words" else (characters_of, characters_of)
    if folder is None:
        return _corpus(EMBEDDED, embedded(plain), MIN_WORD_COUNT, tokens)
    path = Path(folder)
    if (found := _prepared(path)) is None:
        return _corpus(path.name, _plain(path, plain), MIN_WORD_COUNT, tokens)
    name, contents = found
    if name == "Penn Treebank" and not _is_treebank(path, contents):
        name += ", changed"
    return _corpus(name, {part: lines_of(content, prepared) for part, content in contents.items()}, 1, tokens)


def load_prose(folder: str | None = None) -> Prose:
    """Load the same texts as `load_text`, unchanged, for a model with a tokenizer of its own."""
    if folder is None:
        name, parts = EMBEDDED, _joined(_topics())
    elif (found := _prepared(Path(folder))) is not None:
        name, parts = found
    else:
        name, texts = Path(folder).name, _texts(Path(folder))
        if len(texts) >= MIN_SPLIT_TEXTS:
            parts = _joined(texts)
        else:
            whole = "\n".join(texts.values())
            first, second = 8 * len(whole) // 10, 9 * len(whole) // 10
            parts = {"train": whole[:first], "valid": whole[first:second], "test": whole[second:]}
    return Prose(name, hashlib.sha256("\0".join(parts[part] for part in PARTS).encode()).hexdigest(), parts)


def _prepared(path: Path) -> tuple[str, dict[str, str]] | None:
    """Return the name and the content of each part, if the folder has a file for each of them."""
    if not path.is_dir():
        raise UsageError(f"--data: expected a folder, got the file {path}" if path.exists()
                         else f"--data: no such folder: {path}")  # fmt: skip
    try:
        present = {file.name for file in path.iterdir()}
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from error
    for name, pattern in NAMES.items():
        files = {part: pattern.format(part) for part in PARTS}
        if not present.isdisjoint(files.values()):
            missing = [file for file in files.values() if file not in present]
            if missing:
                raise UsageError(f"--data: expected the files of {name} in {path}, got no {missing[0]}")
            return name, {part: read(path / file) for part, file in files.items()}
    return None


def embedded(split: Split) -> dict[str, list[str]]:
    return _split({name: paragraphs_of(text, split) for name, text in _topics().items()})


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    return without_copies(dict(topics))


def without_copies(texts: dict[str, str]) -> dict[str, str]:
    """Return the texts, with each paragraph in one of them only: whole sections are part of several topics.

    Paragraphs stay where `_names` looks first, so that no paragraph of held-out text is in the training text.
    """
    seen: set[str] = set()
    found = {}
    for name in _order(texts):
        paragraphs = [(block, " ".join(block.split())) for block in re.split(r"\n\s*\n", texts[name])]
        kept = []
        for block, words in paragraphs:
            if words not in seen:
                kept.append(block)
            seen.add(words)
        found[name] = "\n\n".join(kept)
    return found


def _texts(folder: Path) -> dict[str, str]:
    """Return the plain texts in a folder by name."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise UsageError(f"--data: expected files {', '.join('*' + s for s in SUFFIXES)} in {folder}, got none")
    return {str(path.relative_to(folder)): read(path) for path in files}


def _plain(folder: Path, split: Split) -> dict[str, list[str]]:
    texts = {name: paragraphs_of(text, split) for name, text in _texts(folder).items()}
    if len(texts) >= MIN_SPLIT_TEXTS:
        return _split(texts)
    words = [word for text in texts.values() for word in text]  # too few files to split by file
    first, second = 8 * len(words) // 10, 9 * len(words) // 10
    return {"train": words[:first], "valid": words[first:second], "test": words[second:]}


def _split(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    return {part: [word for name in names for word in texts[name]] for part, names in _names(texts).items()}


def _joined(texts: dict[str, str]) -> dict[str, str]:
    return {part: "\n\n".join(texts[name] for name in names) for part, names in _names(texts).items()}


def _names(texts: Iterable[str]) -> dict[str, list[str]]:
    """Split by text, in the order of a hash of the names: a tenth each for validation and test."""
    order = _order(texts)
    tenth = max(1, len(order) // 10)
    chosen = {"valid": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
    return {part: sorted(chosen[part]) for part in PARTS}


def _order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def read(path: Path) -> str:
    """Read a text file; errors name the file."""
    try:
        content = read_regular(path, room())
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from error
    if b"\0" in content:
        raise UsageError(f"--data: {path} is not a text file: it contains zero bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--data: {path} is not UTF-8: byte {error.start} is {content[error.start]:#04x}") from None


def lines_of(text: str, split: Split = str.split) -> list[str]:
    """Return the words of prepared text: separated by spaces, one sentence per line."""
    return [word for line in text.removesuffix("\n").split("\n") for word in (*split(line), END)]


def paragraphs_of(text: str, split: Split = words_of) -> list[str]:
    """Return the words of plain text, with an end after each paragraph; empty lines end paragraphs."""
    return [word for block in re.split(r"\n\s*\n", text) if (found := split(block)) for word in (*found, END)]


def with_repeats(tokens: Tensor, context: int) -> Tensor:
    """Return a text (n,) that rewards a look back: in every other piece, the second half repeats the first.

    Args:
        tokens: The text.
        context: Length of a piece.

    Example:
        >>> with_repeats(torch.arange(9), 4)
        tensor([0, 1, 2, 3, 4, 5, 4, 5, 8])
    """
    found, half = tokens.clone(), context // 2
    pieces = found[: len(found) // context * context].view(-1, context)  # a view of `found`
    pieces[1::2, half : 2 * half] = pieces[1::2, :half]
    return found


def _is_treebank(folder: Path, contents: dict[str, str]) -> bool:
    """Return whether the files are those of the published results; warn about each that differs."""
    same = True
    for part, content in contents.items():
        found = hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()
        if found != PTB_MD5[part]:
            warn(f"{folder / NAMES['Penn Treebank'].format(part)}: expected MD5 {PTB_MD5[part]}, got {found}; results "
                 "may not be comparable to published ones")  # fmt: skip
            same = False
    return same


def _corpus(name: str, parts: dict[str, list[str]], rare: int, tokens: Tokens) -> Corpus:
    for part, words in parts.items():
        if len(words) < 3:
            raise UsageError(f"--data: expected at least 3 {tokens} in the {part} part of {name}, got {len(words)}")
    counts = Counter(parts["train"])
    known = sorted((word for word, count in counts.items() if count >= rare), key=lambda word: (-counts[word], word))
    vocabulary = tuple(dict.fromkeys((UNKNOWN, END, *known)))
    place = {word: i for i, word in enumerate(vocabulary)}
    numbers = {part: torch.tensor([place.get(word, 0) for word in words]) for part, words in parts.items()}
    checksum = hashlib.sha256("\n".join(" ".join(parts[part]) for part in PARTS).encode()).hexdigest()
    return Corpus(name, checksum, vocabulary, **numbers, tokens=tokens)
