import time

import pytest
import torch
from safetensors.torch import save_file

import subquad
from subquad.planning import calibration
from subquad.planning.seconds import work
from subquad_lab.cli import main
from subquad_lab.commands.plan import MAX_SHOWN_CANDIDATES, competing, with_options

SHAPE = ["plan", "--length", "32768", "--heads", "8", "--head-dim", "64"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def machine(cache, monkeypatch):
    """One whose calls take as long as their work, so that calibrating it takes no time."""

    def seconds(method, form, shape, device, dtype, known):
        width = 2 * shape.head_dim if isinstance(method, subquad.Exact) else 1  # its work is counted in pairs
        return 1e-4 + 1e-10 * width * sum(work(method, form, shape))

    monkeypatch.setattr(calibration, "measured_seconds", seconds)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("SUBQUAD_CACHE", str(cache))


@pytest.fixture
def sample():
    """Small logits, and keys far from 0."""
    q, k, v = torch.randn(3, 1, 2, 128, 16, generator=torch.Generator().manual_seed(0)).unbind()
    return {"query": 0.3 * q, "key": 0.3 * k + 0.5, "value": v}


def rows(text: str) -> list[str]:
    """The table's lines without its head; an empty line ends it."""
    return text.split("\n\n")[0].splitlines()[1:]


def test_table_and_reason_in_a_pipe(capfd):
    assert main([*SHAPE, "--logit-range", "0.5"]) == 0
    out, _ = capfd.readouterr()
    found = subquad.plan(query_length=32768, heads=8, head_dim=64, is_causal=True, logit_range=0.5)
    assert out.startswith("method ")
    assert with_options(found.reason) in out
    (chosen,) = (line for line in rows(out) if line.endswith("chosen"))
    assert chosen.startswith(found.choice.name)
    assert any(line.startswith("Exact()") for line in rows(out))
    assert len(rows(out)) <= MAX_SHOWN_CANDIDATES
    assert f"Not shown: {len(found.candidates) - len(rows(out))} candidates" in out


def test_all_shows_every_candidate(capfd):
    assert main([*SHAPE, "--logit-range", "0.5", "--all"]) == 0
    out, _ = capfd.readouterr()
    found = subquad.plan(query_length=32768, heads=8, head_dim=64, is_causal=True, logit_range=0.5)
    assert len(rows(out)) == len(found.candidates)
    assert "Not shown" not in out


def test_table_on_a_terminal(capfd, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*SHAPE, "--logit-range", "0.5"]) == 0
    out, _ = capfd.readouterr()
    assert "┃" in out
    assert "chosen" in out
    assert "times as fast" in out


def test_options_reach_the_plan(monkeypatch, capfd):
    asked = {}

    def plan(**arguments):
        asked.update(arguments)
        raise ValueError("batch: enough")

    monkeypatch.setattr(subquad, "plan", plan)
    options = "--key-length 9 --value-dim 8 --key-heads 2 --batch 3 --causal false --training --dtype bfloat16"
    assert main([*SHAPE, *options.split(), "--max-error", "0.1", "--logit-range", "2"]) == 2
    del asked["progress"]
    assert asked == dict(
        query_length=32768, key_length=9, head_dim=64, value_dim=8, heads=8, key_heads=2, batch=3, is_causal=False,
        training=True, purpose="swap", dtype=torch.bfloat16, max_error=0.1, logit_range=2.0, sample=None,
    )  # fmt: skip
    assert capfd.readouterr().err == "subquad: error: --batch: enough\n"


def test_what_competes():
    found = subquad.plan(query_length=32768, heads=8, head_dim=64, is_causal=True, logit_range=0.5)
    kept = competing(found)
    exact = next(c for c in kept if isinstance(c.method, subquad.Exact))
    assert found.choice in kept
    assert all(c.is_chosen_form and (c.is_acceptable or c.seconds < exact.seconds) for c in kept)
    known = sorted((c.seconds, c.error.relative) for c in kept if c.error.relative is not None)
    errors = [error for _, error in known]
    assert errors == sorted(errors, reverse=True), "each slower one is more exact"


def test_acceptable_ones_come_first_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr("subquad_lab.commands.plan.MAX_SHOWN_CANDIDATES", 4)
    found = subquad.plan(query_length=32768, heads=8, head_dim=64, is_causal=True, logit_range=0.5)
    assert [c.is_acceptable for c in competing(found)] == [True] * 4


def test_without_knowledge_of_the_logits_each_kind_has_one_row(capfd):
    """Of methods whose error is unknown, those with usual settings; the others differ in settings alone."""
    assert main(["plan", "--length", "8000", "--heads", "12", "--head-dim", "64"]) == 0
    out, _ = capfd.readouterr()
    names = [line.partition("(")[0] for line in rows(out)]
    assert len(names) == len(set(names)) and "Exact" in names
    if subquad.native.available():
        assert {"Multipole", "Window"} <= set(names)
        assert "A sample of your queries, keys and values (--sample) would measure the error of" in out


@pytest.mark.parametrize("is_terminal", [False, True])
def test_plan_for_training(is_terminal, capfd, monkeypatch):
    if is_terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("COLUMNS", "160")
    assert main([*SHAPE, "--purpose", "train"]) == 0
    out, _ = capfd.readouterr()
    found = subquad.plan(query_length=32768, heads=8, head_dim=64, is_causal=True, purpose="train")
    assert all(c.name in out and c.recall in out for c in found.candidates)
    assert "can recall" in out and "chosen" in out and "Not shown" not in out
    assert " ".join(found.reason.split()) in " ".join(out.split())


@pytest.mark.parametrize("short", [False, True])
def test_sample_gives_sizes_and_errors(sample, short, tmp_path, capfd):
    file = tmp_path / "sample.safetensors"
    save_file({name[0] if short else name: x for name, x in sample.items()}, file)
    assert main(["plan", "--sample", str(file)]) == 0
    out, _ = capfd.readouterr()
    assert with_options(subquad.plan(sample=tuple(sample.values()), is_causal=True).reason) in out
    assert main(["plan", "--sample", str(file), "--length", "100000"]) == 0
    out, _ = capfd.readouterr()
    assert "on sampled rows" in out and out.count("Within budget: 2 times the error is at most 0.05") == 1
    assert "times as fast" in out


def test_a_sample_on_a_terminal_has_the_margin_too(sample, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "160")
    save_file(sample, tmp_path / "sample.safetensors")
    assert main(["plan", "--sample", str(tmp_path / "sample.safetensors"), "--length", "100000"]) == 0
    assert capfd.readouterr().out.count("Within budget: 2 times the error is at most 0.05") == 1


def test_rough_times_are_said_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    assert main(SHAPE) == 0
    assert "".join(capfd.readouterr()).count("Times are rough") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": None}, "expected tensors named query, key and value, or q, k and v; got query, value"),
        ({"key": torch.zeros(1, 2, 128, 8)}, "key: expected width 16, like the query, got 8"),
        ({"value": torch.zeros(1, 2, 5, 16)}, "value: expected length 128, like the key, got 5"),
        ({"query": torch.zeros(16)}, "query: expected shape (..., heads, length, width), got (16,)"),
        ({"query": torch.zeros(1, 2, 128, 16, dtype=torch.int64)}, "query: expected floating point numbers"),
        ({"value": torch.full((1, 2, 128, 16), torch.nan)}, "expected finite values, got NaN or infinity in value"),
    ],
)
def test_unfit_sample_is_told(sample, change, message, tmp_path, complaint):
    file = tmp_path / "sample.safetensors"
    save_file({name: x for name, x in (sample | change).items() if x is not None}, file)
    assert f"--sample: {message}" in complaint(["plan", "--sample", str(file)])


def test_damaged_sample_is_told(sample, tmp_path, complaint):
    file = tmp_path / "sample.safetensors"
    save_file(sample, file)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"--sample: {file} is not a valid safetensors file" in complaint(["plan", "--sample", str(file)])
    assert f"--sample: cannot read {tmp_path}: expected a regular file, got a folder" in complaint(
        ["plan", "--sample", str(tmp_path)]
    )
    missing = str(tmp_path / "no")
    assert f"--sample: no such file: {missing}" in complaint(["plan", "--sample", missing])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "-5"], "--length: expected a positive integer, got -5"),
        (["--length", "0"], "--length: expected a positive integer, got 0"),
        (["--length", "long"], "--length: expected an integer, got 'long'"),
        (["--key-length", "-1"], "--key-length: expected a positive integer, got -1"),
        (["--key-heads", "3"], "--key-heads: expected a number that divides the 8 heads, got 3"),
        (["--batch", "1.5"], "--batch: expected an integer, got '1.5'"),
        (["--dtype", "int8"], "--dtype: expected one of float32, float64, bfloat16, float16, got 'int8'"),
        (["--max-error", "0"], "--max-error: expected a positive number"),
        (["--max-error", "-1"], "--max-error: expected a positive number"),
        (["--logit-range", "-1"], "--logit-range: expected a number >= 0, got -1"),
        (["--logit-range", ".inf"], "--logit-range: expected a number >= 0, got inf"),
        (["--logit-range", "3", "--sample", "file"], "expected either --logit-range or --sample, got both"),
        (["--purpose", "serve"], "--purpose: expected swap or train, got 'serve'"),
        (["--purpose", "train", "--logit-range", "3"], "--logit-range: leave it out with purpose='train'"),
        (["--purpose", "train", "--max-error", "0.1"], "--max-error: leave it out with purpose='train'"),
        (["--causal", "perhaps"], "--causal: expected true or false, got 'perhaps'"),
    ],
)
def test_nonsense_is_told(options, message, complaint):
    assert message in complaint([*SHAPE, *options])


def test_missing_sizes_are_told(complaint):
    assert "--length: expected an integer, or a sample to take it from" in complaint(["plan"])
    assert "--head-dim: expected an integer, or a sample to take it from" in complaint(["plan", "--length", "8"])


def test_first_run_says_that_it_calibrates(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "new"))
    assert main(SHAPE) == 0
    out, err = capfd.readouterr()
    assert err == "calibrating this machine (once), at most 30 s ...\n"
    assert "calibrating" not in out
    assert main(SHAPE) == 0
    assert capfd.readouterr() == (out, "")


def test_first_run_on_a_terminal_shows_a_bar(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "new"))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert main(SHAPE) == 0
    assert "100%" in capfd.readouterr().err
    assert main(SHAPE) == 0
    assert capfd.readouterr().err == ""


def test_interrupted_calibration_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "measured_seconds", interrupted)
    assert main(SHAPE) == 130
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch, complaint):
    blocked = tmp_path / "file"  # A folder without permission would not stop root.
    blocked.touch()
    monkeypatch.setenv("SUBQUAD_CACHE", str(blocked))
    assert "cache: cannot write the calibration of this machine" in complaint(SHAPE)


def test_answer_is_quick_once_calibrated(capfd):
    main(SHAPE)
    spent = []
    for _ in range(3):
        begin = time.perf_counter()
        assert main([*SHAPE, "--logit-range", "3"]) == 0
        spent.append(time.perf_counter() - begin)
    assert min(spent) < 0.7  # Importing torch takes about one second more.
