"""What recorded programs compute, at once for all chunks or tiles, against the plain forms: here without recording.

`test_export.py` records programs, which takes seconds for each; here every method meets every mask and state.
"""

import pytest
import torch
from torch import Tensor

from calls import ALL_METHODS, INF, MASKS, NAN, attended, by_any_method, by_mask, normal_inputs, resumed, totals
from subquad import BlockSparse, Window
from subquad._engines.features import at_once, engine
from subquad._engines.sparse import at_once as sparse_at_once
from subquad._engines.sparse import engine as sparse_engine

WINDOWS = {
    "window": Window(6),
    "window with sinks": Window(6, 3),
    "one key": Window(1, 2),
    "soft-capped": Window(5, 2, softcap=1.5),
    "learned sinks": Window(4, sink_logits=torch.tensor([0.3, -1.0, 2.0, 0.5])),
}


@pytest.fixture
def open_sizes(monkeypatch) -> None:
    """Let the engine take the path of sizes that are not known, in chunks of 4 tokens."""
    monkeypatch.setattr(engine, "has_open_size", lambda *_: True)
    monkeypatch.setattr(at_once, "CHUNK_TOKENS", 4)


def inputs(n: int = 21, **options) -> list[Tensor]:
    q, _, _ = normal_inputs(2, 4, n=n, dtype=torch.float64, **options)
    return [q, *normal_inputs(2, 2, n=n, dtype=torch.float64, seed=1, **options)[1:]]


@by_any_method
@by_mask
def test_chunks_at_once_are_the_dense_form(name, mask, open_sizes) -> None:
    # Exponents of large keys differ by more than exp can bear.
    for std in (1.0, 30.0) if name in ("separable", "positive") else (1.0,):
        q, k, v = inputs(std=std)
        expected = attended(ALL_METHODS[name], q, k, v, form="dense", **MASKS[mask])[0]
        found = attended(ALL_METHODS[name], q, k, v, form="chunked", **MASKS[mask])[0]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        one = [x[0, :1] for x in (q, k, v)]
        masks = {key: x if isinstance(x, bool) else x[0] for key, x in MASKS[mask].items()}
        alone = attended(ALL_METHODS[name], *one, form="chunked", **masks)[0]  # one head of one sequence
        torch.testing.assert_close(alone, expected[0, :1], rtol=1e-8, atol=1e-8)


@by_any_method
@pytest.mark.parametrize("mask", ["causal", "causal, padding", "causal, segments"])
def test_a_sequence_in_pieces_at_once(name, mask, open_sizes) -> None:
    q, k, v = inputs()
    given = {key: value for key, value in MASKS[mask].items() if key != "is_causal"}
    expected = attended(ALL_METHODS[name], q, k, v, form="dense", **MASKS[mask])[0]
    for pieces in ([7, 14], [5, 1, 3, 12], [16, 5]):
        found, state = resumed(ALL_METHODS[name], q, k, v, pieces=pieces, form="chunked", **given)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert state.length == 21
    with pytest.MonkeyPatch.context() as patch:  # the state as the usual forms make it
        patch.setattr(engine, "has_open_size", lambda *_: False)
        _, usual = resumed(ALL_METHODS[name], q, k, v, pieces=[21], form="chunked", **given)
    torch.testing.assert_close(totals(state), totals(usual), rtol=1e-8, atol=1e-8)


@by_any_method
def test_what_is_not_finite_reaches_the_rows_that_see_it(name, open_sizes) -> None:
    q, k, v = inputs()
    k[0, 0, 10], v[1, 1, 3], q[1, 0, 6], q[0, 1, 0] = NAN, INF, NAN, NAN
    for mask in MASKS:
        expected = attended(ALL_METHODS[name], q, k, v, form="dense", **MASKS[mask])[0]
        found = attended(ALL_METHODS[name], q, k, v, form="chunked", **MASKS[mask])[0]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("name", WINDOWS)
@by_mask
def test_tiles_at_once_are_those_in_turn(name, mask, monkeypatch) -> None:
    q, k, v = inputs()
    v[0, 1, 2], k[1, 0, 17], q[0, 0, 0], q[1, 2, 12] = NAN, INF, NAN, INF
    expected = attended(WINDOWS[name], q, k, v, form="dense", **MASKS[mask])[0]
    monkeypatch.setattr(sparse_engine, "in_trace", lambda: True)
    for rows in (4, 21, 64):
        monkeypatch.setattr(sparse_at_once, "BAND_ROWS", rows)
        found = attended(WINDOWS[name], q, k, v, form="dense", **MASKS[mask])[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@by_mask
def test_blocks_at_once_are_those_in_turn(mask, monkeypatch) -> None:
    q, k, v = inputs(24)
    options = {
        key: value if isinstance(value, bool) else torch.cat([value, value[:, -3:]], 1)
        for key, value in MASKS[mask].items()
    }
    layout = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(3)) > 0.4
    expected = attended(BlockSparse(layout), q, k, v, form="dense", **options)[0]
    monkeypatch.setattr(sparse_engine, "in_trace", lambda: True)
    found = attended(BlockSparse(layout), q, k, v, form="dense", **options)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_in_pieces_that_a_compiler_records(name, monkeypatch) -> None:
    """A graph can hold neither a lock nor room for later calls."""
    q, k, v = inputs()
    keep = torch.arange(21)[None] % 5 != torch.arange(2)[:, None]
    for given in (None, keep):
        expected = attended(WINDOWS[name], q, k, v, form="dense", keep=given)[0]
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            found, state = resumed(WINDOWS[name], q, k, v, pieces=[9, 1, 2, 9], keep=given, form="dense")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert state.permit is None and state.keys.shape[-2] <= WINDOWS[name].size - 1


@by_any_method
def test_queries_and_keys_of_different_lengths(name, open_sizes) -> None:
    """Aligned at the start; after a state, at the end."""
    method, (q, k, v) = ALL_METHODS[name], inputs()
    for n, m in ((6, 21), (21, 6)):
        given = q[..., :n, :], k[..., :m, :], v[..., :m, :]
        expected = attended(method, *given, form="dense")[0]
        torch.testing.assert_close(attended(method, *given, form="chunked")[0], expected, rtol=1e-8, atol=1e-8)
    expected = attended(method, q, k, v, form="dense")[0][..., -6:, :]
    _, state = attended(method, *(x[..., :8, :] for x in (q, k, v)), form="chunked", return_state=True)
    found, _ = attended(method, q[..., -6:, :], k[..., 8:, :], v[..., 8:, :], form="chunked", state=state)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
