"""Text from outside: no control character reaches a terminal or a page."""

import ast
import io
import shutil
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console

import subquad_lab
from small_runs import reseal
from subquad_lab.cli import main
from subquad_lab.figures.plots import compared
from subquad_lab.figures.tables import Table
from subquad_lab.system.text import one_line, printable, say
from subquad_lab.training.progress import Display

ATTACK = "a\x1b[2J\x1b]0;b\x07\rc\x08\x9b1m\x7f\u202ed"
SHOWN = r"a\x1b[2J\x1b]0;b\x07\rc\x08\x9b1m\x7f\u202ed"
SOURCE = Path(subquad_lab.__file__).parent


def assert_harmless(text: str, but: str = "\n") -> None:
    raw = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set(but)
    assert raw == set()


def test_every_control_character_is_escaped():
    for number in [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xDCFF]:
        shown = printable(f"a{chr(number)}b")
        assert shown.isprintable() and shown.isascii() and shown[0] == "a" and shown[1] == "\\" and shown[-1] == "b"
    for kept in ("plain", "é ∑ 日本 🙂", "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"):
        assert printable(kept) == kept
    assert one_line("a\n  b\x1b") == r"a b\x1b"


def test_output_is_escaped(capsys):
    say(ATTACK, "x\ny", Path("z\n"))
    assert capsys.readouterr().out == f"{SHOWN}\nx\\ny\nz\\n\n"


def prints_in(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]  # fmt: skip


def test_nothing_is_printed_around_it():
    found = {str(path): lines for path in SOURCE.rglob("*.py") if (lines := prints_in(ast.parse(path.read_text())))}
    assert found == {}
    assert prints_in(ast.parse("def f():\n    print(1)")) == [2]  # The check can fail.


def test_tables_are_escaped(monkeypatch):
    table = Table(["name", "value"], [[ATTACK, "1"], ["two\nlines", "2"]], ATTACK)
    assert_harmless(table.text())
    assert len(table.text().splitlines()) == 4
    console = Console(file=io.StringIO(), width=200)
    console.print(table.with_lines())
    assert SHOWN in console.file.getvalue()
    assert_harmless(console.file.getvalue())


def test_progress_is_escaped(capfd):
    display = Display(f"run {ATTACK}")
    display.line(ATTACK)
    display.evaluated(1, {"loss": 1.0}, "none", True)
    err = capfd.readouterr().err
    assert SHOWN in err
    assert_harmless(err)


def test_plots_are_escaped():
    class Logged:
        def metrics(self):
            return [{"step": 1, "loss": 1.0, "epoch": 0.5, "valid/perplexity": 2.0}]

    class Measured:
        measure, loss_unit = "perplexity", "word"

    assert_harmless(compared({ATTACK: [Logged()], "b": [Logged()]}, Measured()).decode(), but="\n\t")


def test_commands_and_the_report_escape_names(trained, tmp_path, capfd, monkeypatch):
    """Of a folder, of data and of a file."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs" / f"x{ATTACK}\ny\udcff"
    shutil.move(trained, place)
    about = (place / "run.json").read_text()
    (place / "run.json").write_text(about.replace("text in three parts", r"\u001b[31mdata\n"))
    reseal(place)
    page = tmp_path / f"{ATTACK}.html"
    for arguments in (["runs"], ["report", str(place), "--out", str(page)], ["evaluate", str(place)],
                      ["train", "--resume", str(place)]):  # fmt: skip
        assert main(arguments) == 0
        out, err = capfd.readouterr()
        assert_harmless(out + err)
    assert_harmless(page.read_text(), but="\n\t")
    assert SHOWN in page.read_text() and r"\x1b[31mdata\n" in page.read_text()


@pytest.mark.parametrize("arguments", [["evaluate", ATTACK], [ATTACK], ["train", "language", "--data", ATTACK],
                                       ["plan", "--sample", ATTACK], ["train", "language", f"--{ATTACK}", "1"],
                                       ["report", "--theory", ATTACK]])  # fmt: skip
def test_messages_escape_what_was_given(arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_harmless(complaint(arguments))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train", "language", "--out", ""], "--out"),
        (["train", "language", "--out="], "--out"),
        (["train", "language", "--data", ""], "--data"),
        (["train", "language", "--config", ""], "--config"),
        (["train", "--resume", ""], "--resume"),
        (["compare", "language", "--out", ""], "--out"),
        (["sweep", "language", "--grid.lr", "1", "--out", ""], "--out"),
        (["demo", "--out", ""], "--out"),
        (["report", "--out", ""], "--out"),
        (["report", ""], "RUNS"),
        (["runs", "--root", ""], "--root"),
        (["evaluate", ""], "RUN"),
        (["sample", ""], "RUN"),
        (["predict", "", "a.png"], "RUN"),
        (["predict", "run", ""], "IMAGES"),
        (["transcribe", "run", "a.wav", ""], "FILES"),
        (["synthesize", "metadata.csv", ""], "OUT"),
        (["plan", "--sample", ""], "--sample"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(arguments, name, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"subquad: error: {name}: expected a value, got ''" in complaint(arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", ['""', r'"a\0b"'])
def test_a_config_needs_a_path_too(data, complaint, tmp_path):
    (tmp_path / "c.yaml").write_text(f"data: {data}\n")
    line = complaint(["train", "language", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "runs")])
    assert "data: expected a file or folder, got " in line


def test_an_empty_prompt_is_a_prompt(trained, complaint):
    assert "--prompt" not in complaint(["sample", "nowhere", "--prompt", ""])
