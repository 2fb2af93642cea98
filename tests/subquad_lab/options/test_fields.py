"""Configs: every shipped one fits the code; a wrong one is told, and never executed."""

from dataclasses import asdict
from pathlib import Path

import pytest

from subquad_lab import UsageError
from subquad_lab.experiments import EXPERIMENTS
from subquad_lab.options.fields import config_from, presets, read, split_off


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_shipped_config_fits_the_code(name):
    found = presets(name)
    new = ("recall", "convert")  # They repeat no published set-up.
    assert {"sound"} | (set() if name in new else {"published"}) <= found.keys()
    for path in found.values():
        values = read(path)
        config = config_from(EXPERIMENTS[name], values, path)
        assert {key: asdict(config)[key] for key in values} == values


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_sound_preset_is_the_default(name):
    assert config_from(EXPERIMENTS[name], read(presets(name)["sound"]), "sound") == EXPERIMENTS[name].config()


HOSTILE = '!!python/object/apply:os.system ["touch executed"]'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"lr: {HOSTILE}", "could not determine a constructor for the tag"),
        (HOSTILE, "could not determine a constructor for the tag"),
        ("lr: [", "while parsing a flow node"),
        ("- 1", "expected a mapping from field names to values, got list"),
        ("1: 2", "expected a mapping from field names to values, got dict"),
        ("rate: 1", "unknown field 'rate'; language has: seed,"),
        ("lr: fast", "lr: expected a number, got 'fast'"),
        ("batch: 2.5", "batch: expected an integer, got"),
        ("experiment: chess", "expected a config of the experiment 'language', got one of 'chess'"),
    ],
)
def test_a_config_that_is_wrong_is_told_and_never_executed(content, message, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text(content)
    line = complaint(["train", "language", "--config", str(file)])
    assert f"{file}: " in line
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_fields_need_to_fit_together_only_when_all_are_known(complaint, tmp_path):
    """A file may need an option beside it."""
    file = tmp_path / "c.yaml"
    file.write_text("heads: 3\nmodel: transformer\n")
    given = ["train", "language", "--config", str(file), "--data", str(tmp_path / "no")]
    assert "heads: expected a divisor of the width 128, got 3" in complaint(given)
    assert "--data: no such folder" in complaint([*given, "--width", "96"])


@pytest.mark.parametrize("content", ["lr: !!timestamp 2024-99-99", "lr: !!float abc", "lr: !!int ''"])
def test_values_that_yaml_cannot_read_are_told(content, tmp_path):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(UsageError, match=r"c.yaml: "):
        read(tmp_path / "c.yaml")


def test_binary_configs_are_told(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"c.yaml"):
        read(tmp_path / "c.yaml")
    assert read_empty(tmp_path) == {}


def read_empty(folder: Path) -> dict:
    (folder / "empty.yaml").write_text("")
    return read(folder / "empty.yaml")


def test_values_of_a_grid_are_read_as_numbers_and_words():
    rest, found = split_off(
        ["sweep", "--grid.lr", "1e-3,0.1", "language", "--grid.weight-decay=0,1", "--x", "2"], "grid"
    )
    assert rest == ["sweep", "language", "--x", "2"]
    assert found == {"lr": [0.001, 0.1], "weight_decay": [0, 1]}
    assert split_off(["--grid.model", "rnn,lstm"], "grid")[1] == {"model": ["rnn", "lstm"]}
    with pytest.raises(UsageError, match=r"--grid.lr: expected values separated by commas, got nothing"):
        split_off(["--grid.lr"], "grid")
