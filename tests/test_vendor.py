"""The vendored plotting library is the one that tools/vendor_uplot.py names, unchanged."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import vendor_uplot  # noqa: E402


def test_the_files_are_those_of_the_version():
    assert vendor_uplot.changed() == {}
    assert f"v{vendor_uplot.VERSION}" in (vendor_uplot.FOLDER / "uplot.js").read_text()[:200]


@pytest.mark.parametrize("name", vendor_uplot.FILES)
def test_a_changed_file_is_reported(name, tmp_path, monkeypatch):
    for each in vendor_uplot.FILES:
        (tmp_path / each).write_bytes((vendor_uplot.FOLDER / each).read_bytes() + b" " * (each == name))
    monkeypatch.setattr(vendor_uplot, "FOLDER", tmp_path)
    assert list(vendor_uplot.changed()) == [name]
