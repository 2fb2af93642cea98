"""Text for the language model: the right words in the right part, and clear errors for files that are not text."""

import re
from pathlib import Path

import pytest

from subquad_lab import UsageError
from subquad_lab.data import text as module
from subquad_lab.data.text import END, UNKNOWN, load_prose, load_text, paragraphs_of, words_of

TREEBANK = Path(__file__).parents[4] / "shared" / "data" / "ptb"


def words(corpus, part: str) -> list[str]:
    return [corpus.words[i] for i in getattr(corpus, part)]


def test_the_embedded_text_is_pythons_documentation_split_by_topic():
    from pydoc_data.topics import topics

    corpus, prose = load_text(), load_prose()
    assert len(corpus.words) > 1000
    assert len(corpus.train) > 5 * len(corpus.test) > 0
    found = {part: {" ".join(words_of(block)) for block in re.split(r"\n\s*\n", prose.parts[part])} - {""}
             for part in module.PARTS}  # fmt: skip
    every = {" ".join(words_of(block)) for topic in topics.values() for block in re.split(r"\n\s*\n", topic)} - {""}
    assert set.union(*found.values()) == every


def test_no_paragraph_of_held_out_text_is_in_the_training_text():
    """Topics share whole sections: split by topic alone, nine tenths of the validation text were training text."""
    parts = {part: " ".join(prose.split()) for part, prose in load_prose().parts.items()}
    for part in ("valid", "test"):
        pieces = [parts[part][i : i + 100] for i in range(0, len(parts[part]) - 100, 100)]
        assert len(pieces) > 100
        for other in {"train", "valid", "test"} - {part}:
            assert sum(piece in parts[other] for piece in pieces) <= 0.01 * len(pieces), (part, other)


def test_a_paragraph_stays_in_the_text_that_is_held_out_first():
    texts = {str(i): f"common  words\n\nown {i}" for i in range(30)}
    found = module.without_copies(texts)
    first = module._order(texts)[0]
    assert found[first] == texts[first] and first in module._names(texts)["valid"]
    assert all(text == f"own {name}" for name, text in found.items() if name != first)


def test_the_vocabulary_comes_from_the_training_part_alone(tmp_path):
    (tmp_path / "train.txt").write_text("a b a\nb c\n")
    (tmp_path / "valid.txt").write_text("a new b\n")
    (tmp_path / "test.txt").write_text("c other\n")
    corpus = load_text(str(tmp_path))
    assert corpus.words == (UNKNOWN, END, "a", "b", "c")
    assert words(corpus, "train") == ["a", "b", "a", END, "b", "c", END]
    assert words(corpus, "valid") == ["a", UNKNOWN, "b", END]
    assert words(corpus, "test") == ["c", UNKNOWN, END]


@pytest.mark.parametrize("pattern", ["ptb.{}.txt", "wiki.{}.tokens", "{}.txt"])
def test_all_naming_schemes_are_known(pattern, tmp_path, capsys):
    for part in module.PARTS:
        (tmp_path / pattern.format(part)).write_text(f"one two {part}\n")
    assert words(load_text(str(tmp_path)), "train") == ["one", "two", "train", END]
    assert ("expected MD5 f26c4b92c5fdc7b3f8c7cdcb991d8420" in capsys.readouterr().err) == pattern.startswith("ptb")


@pytest.mark.skipif(not TREEBANK.is_dir(), reason="the Penn Treebank is not beside the project")
def test_the_penn_treebank_has_its_published_size(capsys):
    corpus = load_text(str(TREEBANK))
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (929_589, 73_760, 82_430)
    assert len(corpus.words) == 10_000
    assert corpus.name == "Penn Treebank"
    assert capsys.readouterr().err == ""  # The checksums are right.


def test_plain_text_is_split_by_file_or_by_place(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02d}.md").write_text(f"Text number{i}, it says.\n\nA second paragraph, number{i}.\n\n" * 3)
    corpus = load_text(str(tmp_path))
    assert sum(len(getattr(corpus, part)) for part in module.PARTS) == 30 * 3 * (7 + 7)
    few = tmp_path / "few"
    few.mkdir()
    (few / "one.txt").write_text("word " * 1000)
    corpus = load_text(str(few))
    assert [len(getattr(corpus, part)) for part in module.PARTS] == [800, 100, 101]


def test_words_are_words_numbers_and_marks():
    assert words_of("Don't use `x[3]`, äh?") == ["don", "'", "t", "use", "`", "x", "[", "3", "]", "`", ",", "äh", "?"]
    assert paragraphs_of("One\ntwo.\n\n \n\nThree") == ["one", "two", ".", END, "three", END]


def test_the_checksum_tells_texts_apart(text):
    first = load_text(str(text)).checksum
    assert load_text(str(text)).checksum == first
    (text / "test.txt").write_text((text / "test.txt").read_text() + "w1\n")
    assert load_text(str(text)).checksum != first


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected files *.txt, *.md, *.rst in "),
        ({"a.bin": b"x"}, "expected files *.txt"),
        ({"a.txt": b"a\0b"}, "a.txt is not a text file: it contains zero bytes"),
        ({"a.txt": b"abc \xff"}, "a.txt is not UTF-8: byte 4 is 0xff"),
        ({"a.txt": b""}, "expected at least 3 words in the train part of"),
        ({"train.txt": b"a b c", "valid.txt": b"a b c"}, "got no test.txt"),
        ({"ptb.train.txt": b"a"}, "got no ptb.valid.txt"),
    ],
)
def test_what_is_no_text_is_named(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_text(str(tmp_path))


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no such folder"):
        load_text(str(tmp_path / "no"))
    (tmp_path / "a.txt").write_text("some words")

    def refused(path, max_bytes):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "read_regular", refused)  # Root may read everything, so a real file would not do.
    with pytest.raises(UsageError, match=r"cannot read .*a.txt: Permission denied"):
        load_text(str(tmp_path))


def test_characters_are_those_of_the_lines_with_single_spaces(tmp_path):
    for part in module.PARTS:
        (tmp_path / f"{part}.txt").write_text("Ab  b\nb\n")
    corpus = load_text(str(tmp_path), "characters")
    assert words(corpus, "train") == ["A", "b", " ", "b", END, "b", END]
    assert corpus.split("bA b") == ["b", "A", " ", "b"]
    assert corpus.text(corpus.numbers[c] for c in "bA b") == "bA b"


def test_the_embedded_text_has_capitals_as_characters():
    corpus = load_text(None, "characters")
    assert 80 < len(corpus.words) < 200
    assert "".join(words(corpus, "test")[:400]).count(" ") > 40
    assert {"T", "t", ".", " "} <= set(corpus.words)
