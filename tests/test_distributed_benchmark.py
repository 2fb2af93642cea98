"""benchmarks/distributed.py runs at its quick size, and its predictions follow from their model."""

import pytest

from packages import script

distributed = script("distributed")


def test_the_quick_size_writes_a_page_with_counted_bytes(distributed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("results.FOLDER", tmp_path)
    distributed.main(["--quick"])
    (page,) = tmp_path.glob("distributed_*.md")
    text = page.read_text()
    assert "## Strong scaling" in text and "**Not measured.**" in text
    for name in ("Taylor(2), 2 x 16", "Window(256), 2 x 16", "Exact(), 2 x 16"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |") and line.count("|") == 4)
        short, long = (int(cell.replace(",", "")) for cell in line.split("|")[2:4])
        assert long == short > 0 if "Taylor" in name else long > short > 0  # The window is longer than these slices.


def test_predictions_follow_from_bytes_and_latency(distributed) -> None:
    case = distributed.Case(distributed.Taylor(2), 32, 16, 1_000_000)
    cluster = distributed.Cluster(ranks=4, bytes_per_second=1e6, latency=0.5)
    found = distributed.predicted(case, cluster, seconds_per_token=1e-6, state_bytes=320_000)
    assert found["in turn, s"] == pytest.approx(0.25 * (1 + 3 / 32) + 35 * (0.5 + 0.01))
    assert found["gathered, s"] == pytest.approx(0.25 * 1.45 + 3 * (0.5 + 0.32))
    assert found["bytes of the ring"] == 3 * 2 * 32 * 16 * 4 * 250_000
