"""The strict part of YAML: what can surprise or explode is refused, in files and on the command line."""

import time

import pytest
import yaml

from subquad_lab.options.fields import MAX_CONFIG_BYTES
from subquad_lab.options.yaml_values import option_value, yaml_value

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS, "anchors (&) and aliases (*) are not supported"),
        ("lr: &x 1", "anchors (&) and aliases (*) are not supported"),
        ("lr: *x", "anchors (&) and aliases (*) are not supported"),
        ("<<: {lr: 1}", "unknown field '<<'"),
        ("? !!merge <<\n: {lr: 1}", "could not determine a constructor for the tag 'tag:yaml.org,2002:merge'"),
        ("lr: 1\nlr: 2", "duplicate key 'lr'"),
        ('lr: 1\n"lr": 2', "duplicate key 'lr'"),
        ("[lr]: 1", "expected a name as a key"),
        ("lr: " + "[" * 1000, "expected at most 16 levels"),
        ("steps: 1:30", "steps: expected an integer, got '1:30'"),
        ("lr: 1:30.5", "lr: expected a number, got '1:30.5'"),
        ("steps: !!int 1:30", "invalid value '1:30'"),
        ("lr: !!float 1:30.5", "invalid value '1:30.5'"),
        ("steps: 2001-01-01", "steps: expected an integer, got '2001-01-01'"),
        ("steps: !!int " + "9" * 5000, "invalid value '999"),
        ("lr: !!binary aGk=", "could not determine a constructor"),
        ("lr: 1\n---\nlr: 2", "expected a single document"),
        ("lr: 1 #" + "x" * MAX_CONFIG_BYTES, "expected at most 65,536 bytes, got 65,543"),
    ],
)  # fmt: skip
def test_a_config_that_could_surprise_is_refused(content, message, complaint, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    begin = time.monotonic()
    line = complaint(["train", "language", "--config", str(file)])
    assert f"{file}: " in line and message in line and len(line) < 1000
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("option", "value"),
    [("--steps", "1:30"), ("--lr", "1:30.5"), ("--lr", "2001-01-01"), ("--steps", "9" * 5000), ("--steps", "*a")],
)
def test_an_option_does_not_read_what_a_file_may_not_hold(option, value, complaint):
    """Here jsonargparse reads the number, with the loader that was set for it."""
    assert f"{option}: expected " in complaint(["train", "language", f"{option}={value}"])


def test_numbers_and_words():
    text = "{a: 10, b: -0x1F, c: 1.5, d: .5, e: 1_000, f: yes, g: ~, h: .inf, i: 1e3, j: 010, k: 1:30, l: 2001-01-01}"
    found = yaml_value(text)
    assert found == {
        "a": 10, "b": -31, "c": 1.5, "d": 0.5, "e": 1000, "f": True, "g": None, "h": float("inf"), "i": "1e3",
        "j": "010", "k": "1:30", "l": "2001-01-01",
    }  # fmt: skip
    assert [option_value(text) for text in ("1e3", "1e-3", "010", "1:30")] == [1000.0, 0.001, 10, "1:30"]
    assert isinstance(option_value(".nan"), float) and option_value("nan") == "nan"


@pytest.mark.parametrize("name", ["1e3", "08", "010", "1:30", "yes", "null", "0x10", "2001-01-01", "a: b", "*a", "<<"])
def test_the_name_of_a_folder_is_the_same_after_it_was_written(name):
    """A run writes its config with PyYAML's own dumper."""
    assert yaml_value(yaml.safe_dump({"data": name})) == {"data": name}


@pytest.mark.parametrize("value", [0.001, 1e-5, 1e20, 3, -7, True, None, float("inf")])
def test_a_number_is_the_same_after_it_was_written(value):
    assert yaml_value(yaml.safe_dump({"lr": value})) == {"lr": value}
