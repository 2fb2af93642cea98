"""Tables: the same cells on a terminal and in a pipe, figures on the right."""

from subquad_lab.figures.tables import Table

TABLE = Table(("name", "count", "note"), [("a", "1,000", "x"), ("bc", "-7", "[bold]")], "Title", {1: "bold"}, section=1)


def test_in_a_pipe_figures_are_on_the_right_and_no_space_ends_a_line(capsys):
    TABLE.print()
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "name  count  note",
        "a     1,000  x",
        "bc       -7  [bold]",
    ]


def test_on_a_terminal_cells_are_shown_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    TABLE.print()
    out = capsys.readouterr().out
    assert "┃" in out and "Title" in out
    assert "[bold]" in out and "1,000" in out
    assert out.count("├") == 1  # a line after each section but the last


def test_a_column_with_a_word_is_a_column_of_words():
    assert Table(("a", "b"), [("1", "12 ms"), ("one", "")]).text().splitlines() == ["a        b", "1    12 ms", "one"]


def test_a_table_without_rows_has_its_head():
    assert Table(("a", "b"), []).text() == "a  b"
