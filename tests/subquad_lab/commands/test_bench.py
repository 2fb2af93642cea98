import json
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import subquad
from small_runs import heed_interrupts
from subquad_lab.cli import main
from subquad_lab.commands import bench
from subquad_lab.options.methods import parse_method

TOY = ["bench", "--lengths", "64,32", "--methods", "taylor:2,separable", "--heads", "2", "--head-dim", "4"]
ORDER = [(length, name) for length in (32, 64) for name in ("torch", "taylor:2", "separable")]


@pytest.fixture
def quick(monkeypatch, one_thread):
    """A round or two, and a small matrix product."""
    for name, value in {"ROUNDS": 2, "MIN_SECONDS": 0, "PRODUCT_SIZE": 64}.items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.parametrize("options", [[], ["--backward"], ["--causal", "false"]])
def test_table_in_a_pipe(quick, options, capfd):
    assert main([*TOY, *options]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert ("Causal" in lines[0]) == ("--causal" not in options)
    assert ("backward" in lines[0]) == ("--backward" in options)
    assert [tuple(line.split()[:2]) for line in lines[2:8]] == [(str(length), name) for length, name in ORDER]
    assert lines[2].split()[4] == "1.00x"
    assert [line.rpartition(":")[0] for line in err.splitlines()] == [f"length {n}, {name}" for n, name in ORDER]


def test_table_on_a_terminal(quick, capfd, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(TOY) == 0
    out, err = capfd.readouterr()
    assert "┃" in out
    assert out.count("separable") == 2
    assert "measuring, length 64" in err


def test_results_are_written(quick, tmp_path, capfd):
    folder = tmp_path / "new" / "folder"
    assert main([*TOY, "--out", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["bench.json", "bench.svg"]
    content = json.loads((folder / "bench.json").read_text())
    assert (content["heads"], content["head_dim"], content["causal"], content["backward"]) == (2, 4, True, False)
    assert [(row["length"], row["method"]) for row in content["rows"]] == ORDER
    base = {row["length"]: row["seconds"] for row in content["rows"] if row["method"] == "torch"}
    for row in content["rows"]:
        method = {"torch": "exact", "taylor:2": "taylor"}.get(row["method"], row["method"])
        price = subquad.cost(method, query_length=row["length"], head_dim=4, heads=2, is_causal=True)
        assert (row["flops"], row["peak_bytes"]) == (price.flops, price.peak_bytes)
        assert row["speed"] == pytest.approx(base[row["length"]] / row["seconds"])
        assert row["share"] == pytest.approx(price.flops / row["seconds"] / content["product_flops_per_second"])
    image = (folder / "bench.svg").read_text()
    assert ElementTree.fromstring(image).tag.endswith("svg")
    assert all(f"<!-- {text} -->" in image for text in ("torch", "taylor:2", "separable", "32", "64", "seconds"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "0"], "--lengths: expected positive integers, got '0'"),
        (["--lengths", "64,"], "--lengths: expected positive integers, got ''"),
        (["--heads", "-1"], "--heads: expected positive integers, got '-1'"),
        (["--head-dim", "0"], "--head-dim: expected positive integers, got '0'"),
        (["--head-dim", "wide"], "--head-dim: expected an integer, got 'wide'"),
        (["--methods", "softmax"], "--methods: expected one of 'exact', 'taylor', "),
        (["--methods", "taylor:two"], "--methods: expected an integer for degree in 'taylor:two', got 'two'"),
        (["--backward", "partly"], "--backward: expected true or false, got 'partly'"),
        (["--lengths", "1" + 20 * "0"], "--lengths: exact at length 100,000,000,000,000,000,000 can need"),
    ],
)
def test_nonsense_is_told_before_anything_is_measured(options, message, complaint, monkeypatch):
    monkeypatch.setattr(bench, "measured", lambda *arguments: pytest.fail("it was measured"))
    assert message in complaint([*TOY, *options])


def test_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(bench, "measured", lambda *arguments: pytest.fail("it was measured"))
    blocked = tmp_path / "file"
    blocked.touch()
    for folder in (blocked, blocked / "folder"):
        assert main([*TOY, "--out", str(folder)]) == 2
        assert capfd.readouterr().err.startswith(f"subquad: error: --out: cannot write to {folder}: ")


def test_half_a_file_is_never_left(tmp_path, monkeypatch):
    (tmp_path / "bench.json").write_text("old")

    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.write_whole(tmp_path / "bench.json", b"new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("bench.json", "old")]


def test_interrupt_leaves_no_traceback_and_no_file(tmp_path):
    command = [sys.executable, "-m", "subquad_lab", *TOY, "--lengths", "32,8192", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_interrupts
    ) as process:
        assert process.stderr.readline().startswith(b"length 32, torch")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_the_figure_of_plan_and_cost(causal, training):
    """One figure for one call, whoever prints it."""
    case = bench.Case(12, 64, causal, training)
    shape = dict(query_length=8000, heads=12, head_dim=64, is_causal=causal, training=training)
    planned = {c.method: c for c in subquad.plan(**shape).candidates if c.is_chosen_form}
    names = ["exact", "taylor:2", "random:256", "separable", *(["multipole:12"] if subquad.native.available() else [])]
    for name in names:
        method = parse_method(name, "--methods")
        figure = bench.predicted(method, 8000, case).peak_bytes
        assert figure == subquad.cost(method, **shape).peak_bytes == planned[method].peak_bytes, name
