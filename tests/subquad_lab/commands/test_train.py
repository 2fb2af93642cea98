"""The commands about a run as a user has them: train, resume, evaluate, runs, sample."""

import json
import re
import shutil
from dataclasses import fields

import pytest

from small_runs import read_config, reseal
from subquad_lab.cli import main
from subquad_lab.experiments import EXPERIMENTS, language
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.options.fields import given_fields
from subquad_lab.training.run import Run


def test_train_leaves_a_whole_record(options, tmp_path, capfd):
    assert main(["train", "language", *options, "--seed=3"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"test: cross-entropy [\d.]+, perplexity [\d.]+", out)
    assert "validation: cross_entropy" in err
    folder = tmp_path / "runs" / "language-001"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "run.json", "metrics.jsonl", "timing.jsonl", "events", "result.json", "curves.svg",
        "checkpoints", "SHA256SUMS",
    }  # fmt: skip
    about = json.loads((folder / "run.json").read_text())
    assert about["data"]["name"] == "text in three parts"
    assert len(about["data"]["sha256"]) == 64
    assert about["parameters"]["total"] > 0
    assert {"torch", "python", "subquad"} < about["versions"].keys()
    assert experiment_of(Run(folder)) == (language.EXPERIMENT, language.Config(**read_config(folder)))
    assert read_config(folder)["seed"] == 3
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert not {"seconds", "time", "speed"} & {key for line in lines for key in line}  # Nothing of the clock.
    assert list((folder / "events").iterdir())
    assert (folder / "curves.svg").read_text().startswith("<?xml")


def test_a_run_is_repeated_by_its_own_config(trained, tmp_path):
    out = tmp_path / "again"
    assert main(["train", "language", "--config", str(trained / "config.yaml"), "--out", str(out)]) == 0
    assert (out / "language-001" / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()
    other = [line for line in Run(out / "language-001").metrics() if "loss" in line]
    assert other != []


def test_another_seed_is_another_run(trained, options):
    assert main(["train", "language", *options, "--seed=1"]) == 0
    second = trained.with_name("language-002")
    assert (second / "metrics.jsonl").read_bytes() != (trained / "metrics.jsonl").read_bytes()


def test_options_go_before_the_config_and_a_config_before_a_preset(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("lr: 0.5\nwidth: 64\n")
    found = given_fields(language.EXPERIMENT, ["train", "language", "--preset=published", "--config", str(file)])
    assert (found["lr"], found["width"], found["batch"]) == (0.5, 64, 128)


def test_evaluate_and_runs_and_sample(trained, tmp_path, capfd):
    assert main(["evaluate", str(trained), "--part", "test"]) == 0
    result = json.loads((trained / "result.json").read_text())
    assert f"perplexity {result['test']['perplexity']:.4g}" in capfd.readouterr().out
    assert main(["runs", "--root", str(tmp_path / "runs")]) == 0
    shown = capfd.readouterr().out
    assert re.match(r"run +experiment +model +data", shown)
    assert re.search(r"language-001 .* rnn .* finished .* perplexity", shown)
    assert main(["sample", str(trained), "--prompt", "w1 w2", "--count", "3", "--words", "5"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("w1 w2") for line in lines)
    (tmp_path / "none").mkdir()
    assert main(["runs", "--root", str(tmp_path / "none")]) == 0
    assert "no runs in" in capfd.readouterr().out


def test_a_finished_run_is_not_trained_again(trained, capfd):
    before = (trained / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(trained)]) == 0
    assert "4 steps" in capfd.readouterr().out
    assert (trained / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "EXPERIMENT: expected an experiment or --resume RUN, got neither"),
        (
            ["train", "chess"],
            "invalid choice: 'chess' (choose from 'language', 'images', 'graphs', 'speech', 'recall', 'convert')",
        ),
        (["train", "language", "--lr", "fast"], "--lr: expected a number, got 'fast'"),
        (["train", "language", "--model", "gru"], "--model: expected one of 'rnn', 'lstm', 'transformer', got 'gru'"),
        (["train", "language", "--rate", "1"], "unrecognized arguments: --rate 1"),
        (["train", "language", "--batch", "0"], "batch: expected a positive integer, got 0"),
        (
            ["train", "language", "--preset", "best"],
            "--preset: expected one of attention, characters, long, lstm, published, quick, rnn, sound, got 'best'",
        ),
        (["train", "language", "--config", "no.yaml"], "no.yaml: No such file or directory"),
        (["train", "language", "--data", "nowhere"], "--data: no such folder"),
        (["train", "--resume", "nowhere"], "RUN: no such folder: nowhere"),
        (["evaluate", "nowhere"], "RUN: no such folder: nowhere"),
        (["sample", "nowhere"], "RUN: no such folder: nowhere"),
        (["sample", "nowhere", "--top-p", "2"], "--top-p: expected a number in (0, 1], got 2.0"),
        (["sample", "nowhere", "--temperature", "-1"], "--temperature: expected a number >= 0, got -1.0"),
        (["report", "nowhere"], "RUN: no such folder: nowhere"),
        (["report", "--root", "nowhere"], "RUN: expected at least one run in nowhere, got none"),
        (["sweep", "language"], "--grid: expected --grid.FIELD A,B,C or --span.FIELD LOW,HIGH, got neither"),
        (["sweep", "language", "--grid.rate", "1"], "--grid.rate: unknown field 'rate'; language has:"),
        (["sweep", "language", "--grid.lr", "1,x"], "--grid.lr: lr: expected a number, got 'x'"),
        (["sweep", "language", "--span.lr", "2,1"], "--span.lr: expected two numbers, the lower first, got [2, 1]"),
        (["compare", "language", "--model", "lstm"], "--model: compare sets it for each variant"),
        (["compare", "language", "--preset", "lstm", "--data=no"], "--model: compare sets it for each variant"),
        (["compare", "images", "--downsample", "stride", "--data=no"], "--downsample: compare sets it"),
        (["compare", "images", "--downsample=pool", "--data=no"], "--downsample: compare sets it"),
        (["compare", "graphs", "--self-loops=false", "--data=no"], "--self-loops: compare sets it"),
        (
            ["sweep", "language", "--grid.lr", "1", "--span.lr", "1,2"],
            "--span.lr: expected either --grid or --span",
        ),
        (["sample"], "the following arguments are required: RUN"),
        (["train", "language", "--width", "1000000"], "width: a model of width 1000000 needs"),
        (["train", "language", "--seed", "9" * 25], "seed: expected an integer in [0, 2^32)"),
        (
            ["train", "language", "--method", "random:100000000000"],
            "method: expected at most 65,536 features, got 100,000,000,000",
        ),
        (["train", "language", "--data", "/dev/null"], "--data: expected a folder, got the file /dev/null"),
        (["sample", "nowhere", "--seed", "9" * 25], "--seed: expected an integer >= 0"),
        (["compare"], "EXPERIMENT: expected an experiment, got none"),
    ],
)
def test_nonsense_is_told_in_one_line(arguments, message, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_told(tmp_path, complaint):
    assert f"RUN: expected a run folder, got {tmp_path}, which has no config.yaml" in complaint(
        ["evaluate", str(tmp_path)]
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", "", "result.json: not a valid JSON file"),
        ("result.json", "[1]", "result.json: expected an object, got list"),
        ("run.json", "{", "run.json: not a valid JSON file"),
        ("config.yaml", "experiment: x", "EXPERIMENT: expected"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_listed(file, content, message, trained, tmp_path, capfd):
    shutil.copytree(trained, tmp_path / "runs" / "damaged")
    (tmp_path / "runs" / "damaged" / file).write_text(content)
    reseal(tmp_path / "runs" / "damaged")
    assert main(["runs", "--root", str(tmp_path / "runs")]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"^language-001 .* finished .* perplexity", out, re.MULTILINE)
    assert re.search(rf"^damaged +damaged +{message}", out, re.MULTILINE)
    assert err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["language", "--width", "0"], "--width: expected"),
        (["language", "--weight-decay", "-1"], "--weight-decay: expected a number >= 0, got -1.0"),
        (["speech", "--clips", "3"], "--clips: expected 24 to 10,000 spoken numbers, got 3"),
        (["images", "--batch", "100000"], "--batch: expected at most 1,079, the number of training images"),
    ],
)
def test_what_is_wrong_is_named_as_the_option_that_gives_it(options, message, complaint, tmp_path):
    assert f"subquad: error: {message}" in complaint(["train", *options, "--out", str(tmp_path)])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_of_every_field_comes_from_the_config(name, capfd):
    with pytest.raises(SystemExit) as end:
        main(["train", name, "--help"])
    assert end.value.code == 0
    text = " ".join(capfd.readouterr().out.split())
    for field in fields(EXPERIMENTS[name].config):
        option = field.name.replace("_", "-")
        assert re.search(rf"--{option} (\{{\S+\}}|[A-Z_]+|\[\S+\]) \w+", text), option


@pytest.mark.parametrize("experiment", ["language", "images", "graphs", "speech", "convert"])
def test_a_link_that_leads_back_to_itself_is_refused(experiment, tmp_path, complaint):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    message = complaint(["train", experiment, f"--data={tmp_path / 'loop'}", f"--out={tmp_path / 'runs'}"])
    assert "loop" in message and "symbolic links" in message
