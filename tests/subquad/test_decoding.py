"""One token after its state: the step kernel, or torch's form "step", means the same as the whole sequence."""

import pytest
import torch
from torch import Tensor

from reference import METHODS
from subquad import Decoder, RandomFeatures, Taylor, attention, native
from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.features import engine
from subquad._engines.features.fused import fused_step
from subquad._engines.features.kernel import Kernel

pytestmark = pytest.mark.filterwarnings("ignore:.*weights can be negative")

H, N, D = 2, 13, 4
# Methods whose steps the kernels compute: the others have no native map, or one normalizer per feature.
BY_KERNELS = {
    "taylor1", "taylor2", "taylor3", "shifted", "both sides", "queries", "positive", "scaled", "balanced", "hyperbolic",
    "identity", "elu", "relu",
}  # fmt: skip


def draw(*shapes, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.fixture
def kernel_steps(monkeypatch) -> list[object]:
    """The methods of the steps that the kernels have computed."""
    steps: list[object] = []
    monkeypatch.setattr(engine, "fused_step", lambda method, *rest: steps.append(method) or fused_step(method, *rest))
    return steps


def decoded_whole(method, inputs: list[Tensor], **options) -> tuple[Tensor, object, list[str]]:
    """Return the outputs of all tokens, one after another, the last state, and the forms that were executed."""
    state, outputs, forms = None, [], []
    for token in zip(*(x.split(1, -2) for x in inputs), strict=True):
        call = Call.of(*token, is_causal=True, enable_gqa=True, state=state, return_state=True, **options)
        output, state, form = run(method, call)
        outputs.append(output)
        forms.append(form)
    return torch.cat(outputs, -2), state, forms


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", ["trained", "inference"])
def test_decoding_takes_steps_and_means_the_same(name, group, kind, kernel_steps) -> None:
    """Token by token: outputs and states of the whole sequence; and its gradients, which the kernels leave to torch."""
    trained = kind == "trained"
    generator = torch.Generator().manual_seed(0)
    shapes = (2, H * group, N, D), (2, H, N, D), (2, H, N, D)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=trained) for s in shapes]
    method = METHODS[name]
    whole, last = attention(*inputs, is_causal=True, enable_gqa=True, method=method, return_state=True)
    joined, state, forms = decoded_whole(method, inputs)
    assert forms[1:] == ["step"] * (N - 1)
    by_kernels = native.available() and name in BY_KERNELS and not trained
    assert len(kernel_steps) == (N - 1 if by_kernels else 0)
    assert state.length == last.length == N
    close(joined, whole)
    exponent = 0.0 if last.log_scale is None else (state.log_scale - last.log_scale)[..., None]
    close(state.sums * torch.as_tensor(exponent).exp(), last.sums)
    if trained:
        cotangent = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
        expected = torch.autograd.grad(whole, inputs, cotangent, retain_graph=True, materialize_grads=True)
        found = torch.autograd.grad(joined, inputs, cotangent, materialize_grads=True)
        for a, b in zip(found, expected, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_without_kernels_the_steps_are_those_of_torch(name, kernel_steps, torch_alone) -> None:
    inputs = draw((2, H, N, D), (2, H, N, D), (2, H, N, 3), dtype=torch.float64)
    whole = attention(*inputs, is_causal=True, method=METHODS[name])
    joined, _, forms = decoded_whole(METHODS[name], inputs)
    assert forms[1:] == ["step"] * (N - 1) and not kernel_steps
    close(joined, whole)


def test_without_kernels_a_plain_step_takes_few_operations(monkeypatch, torch_alone) -> None:
    """Key, query and value share the map and the checks; with a mask, the general step computes them apart."""
    general = []
    step = Kernel.step
    monkeypatch.setattr(Kernel, "step", lambda kernel, *rest: general.append(kernel) or step(kernel, *rest))
    token = draw((1, H, 1, D), (1, H, 1, D), (1, H, 1, D))
    _, state = attention(*token, is_causal=True, method="taylor", return_state=True)
    attention(*token, is_causal=True, method="taylor", state=state)
    assert not general
    shown = torch.ones(1, 1, dtype=torch.bool)
    attention(*token, is_causal=True, method="taylor", state=state, key_padding_mask=shown)
    assert len(general) == 1


@pytest.mark.skipif(not native.available(), reason="no kernels")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_attention_decodes_by_the_step_kernel_where_nothing_hinders_it(kernel_steps) -> None:
    q, k, v = draw((1, H, N, D), (1, H, N, D), (1, H, N, D))
    first, token = [x[:, :, :-1] for x in (q, k, v)], [x[:, :, -1:] for x in (q, k, v)]
    _, state = attention(*first, is_causal=True, method="taylor", return_state=True)
    kept = state.sums.clone()
    plain = dict(is_causal=True, method="taylor", state=state)

    def taken(*token: Tensor, **options) -> int:
        kernel_steps.clear()
        attention(*token, **plain | options)
        return len(kernel_steps)

    assert taken(*token) == taken(*token, return_state=True) == taken(*token, is_causal=False) == 1
    assert taken(*(x.half() for x in token)) == 1
    assert torch.equal(state.sums, kept)  # The state is a value.
    assert taken(*token, key_padding_mask=torch.ones(1, 1, dtype=torch.bool)) == 0
    assert taken(token[0].clone().requires_grad_(), *token[1:]) == 0
    assert torch.func.grad(lambda q: attention(q, *token[1:], **plain).sum())(token[0]).any()
    assert len(kernel_steps) == 0
    with torch.no_grad():
        assert taken(token[0].clone().requires_grad_(), *token[1:]) == 1
    kernel_steps.clear()
    traced = torch.jit.trace(lambda q: attention(q, *token[1:], **plain), token[0], check_trace=False)
    assert not kernel_steps
    torch.testing.assert_close(traced(token[0]), attention(*token, **plain))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_decoding_poisons_what_the_whole_sequence_poisons(name, bad, place) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, H, 5, D, generator=generator, dtype=torch.float64) for _ in range(3)]
    inputs[place][0, 0, 2, 1] = bad
    whole = attention(*inputs, is_causal=True, method=METHODS[name])
    state, outputs = None, []
    for token in zip(*(x.split(1, -2) for x in inputs), strict=True):
        output, state = attention(*token, is_causal=True, method=METHODS[name], state=state, return_state=True)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, -2), whole, rtol=1e-9, atol=1e-10, equal_nan=True)
    assert torch.equal(state.poison.isnan(), torch.tensor([[place > 0, False]]))


def decoded(made_by, **changes) -> torch.Tensor:
    """One token after three, values as wide as keys."""
    q, k, v = (x.clone() for x in draw((2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4)))
    _, state = attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], is_causal=True, method=made_by, return_state=True)
    token = dict(query=q[:, :, 3:], key=k[:, :, 3:], value=v[:, :, 3:], method=made_by)
    return attention(**token | changes, is_causal=True, state=state, return_state=True)[0]


def test_a_token_that_does_not_fit_its_state_is_refused() -> None:
    token = draw((2, 2, 1, 4))[0]
    for change, message in (
        (dict(method=Taylor(0)), "state: expected one made by Taylor"),
        (dict(method=RandomFeatures(8, seed=1)), "state: expected one made by Random"),
        (dict(query=token[:1], key=token[:1], value=token[:1]), "state: expected"),
        (dict(value=token[..., :2]), "state: expected"),
        (dict(query=token.double(), key=token.double(), value=token.double()), "state: expected"),
        (dict(value=token.double()), "value: expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            decoded(RandomFeatures(8), **change)


@pytest.mark.parametrize("name", ["taylor2", "positive", "elu", "user"])
def test_a_hidden_token_adds_nothing_to_the_state(name) -> None:
    q, k, v = draw((2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4), dtype=torch.float64)
    keep = torch.tensor([[True, True, True, False], [True] * 4])
    whole = attention(q, k, v, is_causal=True, method=METHODS[name], key_padding_mask=keep)
    _, state = attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], is_causal=True, method=METHODS[name], return_state=True)
    last = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True, method=METHODS[name], state=state,
                     key_padding_mask=keep[:, 3:])  # fmt: skip
    torch.testing.assert_close(last, whole[:, :, 3:])


@pytest.mark.parametrize("method", [Taylor(2), RandomFeatures(16), RandomFeatures(16, "hyperbolic")], ids=str)
def test_a_state_with_gaps_in_memory_decodes_like_its_copy(method) -> None:
    """Copies that the kernel reads must live until it has returned."""
    q, k, v = draw((64, 1, 5, 4), (64, 1, 5, 4), (64, 1, 5, 4))
    _, state = attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], is_causal=True, method=method, return_state=True)
    token = [x[::2, :, 4:] for x in (q, k, v)]
    strided, whole = state[::2], state[torch.arange(0, 64, 2)]
    assert not strided.poison.is_contiguous() and whole.poison.is_contiguous()
    found, after = attention(*token, is_causal=True, method=method, state=strided, return_state=True)
    expected, wanted = attention(*token, is_causal=True, method=method, state=whole, return_state=True)
    assert torch.equal(found, expected) and torch.equal(after.sums, wanted.sums)
    assert torch.equal(after.poison, wanted.poison)


def test_a_decoder_takes_a_query_without_heads() -> None:
    q, k, v = draw((4,), (2, 6, 4), (2, 6, 4))
    _, state = attention(k, k, v, is_causal=True, method=Taylor(2), return_state=True)
    found = Decoder(state)(q[None], k[:, :1], v[:, :1])
    expected, _ = attention(q[None], k[:, :1], v[:, :1], is_causal=True, method=Taylor(2), state=state,
                            return_state=True)  # fmt: skip
    close(found, expected)
