"""benchmarks/sparse.py runs at its quick size, and its BigBird-like layout has the density that was asked for."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from packages import script, skip_without

skip_without("matplotlib")

sparse = script("sparse")


def test_the_script_writes_a_page_and_its_data(sparse: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules[sparse.write_page.__module__], "FOLDER", tmp_path)
    sparse.main(["--quick"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "## Window" in page and "| 512 | 64 |" in page
    assert Counter(row["table"] for row in data["rows"]) == {"window": 1, "step": 1, "blocks": 1}


def test_layouts_have_neighbors_first_blocks_and_a_density(sparse: Any) -> None:
    layout = sparse.bigbird(16_384, 0.1)
    assert layout.shape == (1, 256, 256)
    assert float(layout.float().mean()) == pytest.approx(0.1, abs=0.01)
    assert bool(layout[0].diagonal().all()) and bool(layout[0, :, 0].all()) and bool(layout[0, 0].all())


def test_pairs_are_those_of_the_mask(sparse: Any) -> None:
    near = torch.ones(50, 50, dtype=torch.bool).tril().triu(-6)
    assert sparse.pairs(50, 7) == 8 * int(near.sum())
