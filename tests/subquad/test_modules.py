"""MultiheadAttention compared with torch's own, and replace_attention on torch's models."""

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from subquad import (
    Auto,
    Exact,
    Linear,
    MultiheadAttention,
    RandomFeatures,
    Replacement,
    Separable,
    Taylor,
    attention,
    replace_attention,
)

WIDTH, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7
HIDDEN = float("-inf")

LINEAR = [Taylor(2), RandomFeatures(32), Linear("elu"), Linear("identity"), Separable()]
METHODS = [Exact(), *LINEAR]
NORMALIZED = [method for method in METHODS if method != Linear("identity")]

SHAPES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "kdim vdim": {"kdim": 8, "vdim": 10, "batch_first": True},
    "kdim": {"kdim": 8},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}


def name_of(method: object) -> str:
    return method.__name__ if isinstance(method, type) else type(method).__name__


@pytest.fixture(autouse=True)
def settings():
    """Use float64, so that results agree to 1e-10, and one thread, which is enough for small tensors."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def both(method="exact", **options) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Return torch's module and ours with the same parameters, none of them zero."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(WIDTH, HEADS, **options, method=method)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(module: nn.Module, n: int = QUERIES, m: int = KEYS, batch: int = BATCH) -> list[Tensor]:
    shapes = [(batch, n, WIDTH), (batch, m, module.kdim), (batch, m, module.vdim)]
    if not module.batch_first:
        shapes = [(length, batch, width) for batch, length, width in shapes]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def module_of(method, **options) -> MultiheadAttention:
    return both(method, **{"batch_first": True, **options})[1]


def causal(n: int = QUERIES, m: int = KEYS) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).triu(1)


def as_numbers(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, HIDDEN)


def padding() -> Tensor:
    return torch.tensor([[False] * KEYS, [False] * (KEYS - 3) + [True] * 3])


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False  # Each query sees a key; torch returns NaN otherwise.
    return mask


MASKS = {
    "none": dict,
    "padding": lambda: {"key_padding_mask": padding()},
    "padding, numbers": lambda: {"key_padding_mask": as_numbers(padding())},
    "padding, bias": lambda: {"key_padding_mask": torch.randn(BATCH, KEYS)},
    "pairs": lambda: {"attn_mask": random_mask(QUERIES, KEYS)},
    "pairs, bias": lambda: {"attn_mask": torch.randn(QUERIES, KEYS)},
    "pairs per head": lambda: {"attn_mask": random_mask(BATCH * HEADS, QUERIES, KEYS)},
    "pairs per head, bias": lambda: {"attn_mask": torch.randn(BATCH * HEADS, QUERIES, KEYS)},
    "pairs and padding": lambda: {"attn_mask": random_mask(QUERIES, KEYS), "key_padding_mask": padding()},
    "per head and padding": lambda: {
        "attn_mask": torch.randn(BATCH * HEADS, QUERIES, KEYS),
        "key_padding_mask": as_numbers(padding()),
    },
    "causal and padding": lambda: {"attn_mask": causal(), "key_padding_mask": padding(), "is_causal": True},
}
WEIGHTS = (
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
)


def assert_same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def run(module: nn.Module, tensors: list[Tensor], **options) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return the outputs, and the gradients of a loss that weights each number differently."""
    output, weights = module(*tensors, **options)
    loss = (output * torch.arange(output.numel()).reshape(output.shape).sin()).sum()
    if weights is not None:
        loss = loss + (weights * torch.arange(weights.numel()).reshape(weights.shape).cos()).sum()
    return output, weights, list(torch.autograd.grad(loss, [*tensors, *module.parameters()]))


# --- Exact() is nn.MultiheadAttention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["plain", "batch first", "kdim vdim", "bias_kv", "both"])
def test_exact_is_torch(shape, mask):
    theirs, ours = both(**SHAPES[shape])
    tensors, masks = inputs(ours), MASKS[mask]()
    for weights in WEIGHTS:
        assert_same(run(ours, tensors, **masks, **weights), run(theirs, tensors, **masks, **weights))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_exact_without_a_batch_is_torch(weights, batch_first):
    theirs, ours = both(batch_first=batch_first)
    tensors = [torch.randn(length, WIDTH, requires_grad=True) for length in (QUERIES, KEYS, KEYS)]
    for masks in (
        {},
        {"key_padding_mask": padding()[1]},
        {"attn_mask": random_mask(QUERIES, KEYS)},
        {"attn_mask": torch.randn(HEADS, QUERIES, KEYS), "key_padding_mask": as_numbers(padding()[1])},
    ):
        assert_same(run(ours, tensors, **masks, **weights), run(theirs, tensors, **masks, **weights))


@pytest.mark.parametrize("need_weights", [False, True])
def test_exact_drops_what_torch_drops(need_weights):
    theirs, ours = both(dropout=0.5)
    tensors, results = inputs(ours), []
    for module in (ours, theirs):
        torch.manual_seed(1)
        results.append(module(*tensors, need_weights=need_weights))
    assert_same(*results)
    assert not torch.equal(results[0][0], ours.eval()(*tensors, need_weights=need_weights)[0])
    assert_same(ours(*tensors), theirs.eval()(*tensors))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("n", [QUERIES, KEYS, KEYS + 2])
@pytest.mark.parametrize("shape", ["plain", "batch first", "kdim vdim"])
def test_exact_causal_is_torch(shape, n, need_weights):
    theirs, ours = both(**SHAPES[shape])
    tensors = inputs(ours, n)
    options = {"need_weights": need_weights, "is_causal": True}
    expected = run(theirs, tensors, attn_mask=causal(n), **options)
    assert_same(run(ours, tensors, attn_mask=causal(n), **options), expected)
    assert_same(run(ours, tensors, **options), expected)  # Torch raises here.


@pytest.mark.parametrize("shape", SHAPES)
def test_initialization_is_torch_s(shape):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **SHAPES[shape])
    torch.manual_seed(3)
    ours = MultiheadAttention(WIDTH, HEADS, **SHAPES[shape], method="random")
    expected, found = list(theirs.named_parameters()), list(ours.named_parameters())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_device_and_dtype_are_passed_on():
    layer = MultiheadAttention(WIDTH, HEADS, device="meta", dtype=torch.float16, method="random")
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert layer.random_matrix.device.type == "meta"


# --- Masks in every method --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.filterwarnings("ignore:need_weights")
def test_a_query_that_sees_no_key_gets_zero(method, need_weights):
    layer, hidden = module_of(method), torch.zeros(BATCH, KEYS, dtype=torch.bool)
    hidden[0] = True
    tensors = inputs(layer)
    output, weights, gradients = run(layer, tensors, key_padding_mask=hidden, need_weights=need_weights)
    assert_same(output[0], layer.out_proj.bias.expand(QUERIES, -1))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient[0].count_nonzero() == 0 for gradient in gradients[:3])
    assert output[1].isfinite().all()
    assert weights is None or weights[0].count_nonzero() == 0


@pytest.mark.parametrize("own", [{}, SHAPES["both"]], ids=str)
@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_padded_is_unpadded(method, numbers, own):
    layer = module_of(method, **own)
    query, key, value = inputs(layer)
    mask = as_numbers(padding()) if numbers else padding()
    output, _ = layer(query, key, value, key_padding_mask=mask, need_weights=False)
    for_all = mask[:, None, None].expand(-1, HEADS, QUERIES, -1).flatten(0, 1)
    assert_same(layer(query, key, value, attn_mask=for_all, need_weights=False)[0], output)
    for i, length in enumerate((KEYS, KEYS - 3)):
        alone, _ = layer(query[i], key[i, :length], value[i, :length], need_weights=False)
        assert_same(output[i], alone)
    gradients = torch.autograd.grad(output.sum(), [key, value])
    assert all(gradient[1, -3:].count_nonzero() == 0 for gradient in gradients)
    assert all(gradient[1, :-3].count_nonzero() > 0 for gradient in gradients[1:])


@pytest.mark.parametrize("method", LINEAR, ids=name_of)
def test_nan_in_padding_stays_there(method):
    layer = module_of(method)
    query, key, value = (x.detach() for x in inputs(layer))
    expected = layer(query, key, value, key_padding_mask=padding(), need_weights=False)[0]
    key[padding()] = value[padding()] = torch.nan
    assert_same(layer(query, key, value, key_padding_mask=padding(), need_weights=False)[0], expected)


@pytest.mark.parametrize("own", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, SHAPES["both"]], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.filterwarnings("ignore:need_weights")
def test_causal_is_every_prefix_for_itself(method, own):
    """Also if the module has keys of its own, which all queries see."""
    layer = module_of(method, **own)
    query, key, value = inputs(layer, n=KEYS)
    output, none = layer(query, key, value, need_weights=False, is_causal=True)
    again, weights = layer(query, key, value, is_causal=True)
    assert none is None
    assert_same(again, output)
    for i in range(KEYS):
        prefix, row = layer(query[:, i : i + 1], key[:, : i + 1], value[:, : i + 1])
        assert_same(output[:, i : i + 1], prefix)
        seen = torch.cat([weights[:, i, : i + 1], weights[:, i, KEYS:]], -1)
        assert_same(seen, row[:, 0])
        assert weights[:, i, i + 1 : KEYS].count_nonzero() == 0


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.parametrize("n", [QUERIES, KEYS, KEYS + 2])
def test_a_causal_mask_is_recognized(method, n):
    layer = module_of(method)
    tensors = inputs(layer, n)
    expected, _ = layer(*tensors, need_weights=False, is_causal=True)
    free, _ = layer(*tensors, need_weights=False)
    assert not torch.allclose(expected, free)
    mask = causal(n)
    for given in (mask, as_numbers(mask), mask.expand(BATCH * HEADS, -1, -1), as_numbers(mask).float()):
        for is_causal in (False, True):
            output, _ = layer(*tensors, need_weights=False, attn_mask=given, is_causal=is_causal)
            assert_same(output, expected)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_a_mask_that_factors_is_split(method):
    layer = module_of(method)
    tensors = inputs(layer, KEYS)
    hidden = padding()
    per_head = hidden[:, None, None].expand(-1, HEADS, KEYS, -1).flatten(0, 1)

    def output(**options) -> Tensor:
        return layer(*tensors, need_weights=False, **options)[0]

    assert_same(output(attn_mask=per_head), output(key_padding_mask=hidden))
    assert_same(output(attn_mask=torch.zeros(KEYS, KEYS)), output())
    merged = per_head | causal(KEYS)
    assert_same(output(attn_mask=merged), output(key_padding_mask=hidden, is_causal=True))
    assert_same(
        output(attn_mask=causal(KEYS), key_padding_mask=as_numbers(hidden), is_causal=True),
        output(key_padding_mask=hidden, is_causal=True),
    )
    one = layer(tensors[0][:, :1], *tensors[1:], need_weights=False, attn_mask=hidden[1:])[0]
    both_rows = layer(tensors[0][:, :1], *tensors[1:], need_weights=False, key_padding_mask=hidden[[1, 1]])[0]
    assert_same(one, both_rows)


@pytest.mark.parametrize("method", LINEAR, ids=name_of)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("attn_mask", causal().flip(1)),
        ("attn_mask", ~causal()),
        ("attn_mask", causal() | causal().roll(-3, 1)),
        ("attn_mask", torch.linspace(-1, 0, QUERIES * KEYS).reshape(QUERIES, KEYS)),
        ("attn_mask", as_numbers(causal()) + 0.5),
        ("key_padding_mask", torch.full((BATCH, KEYS), 0.5)),
        ("key_padding_mask", torch.tensor([[0.0] * KEYS, [0.0] * (KEYS - 1) + [-100.0]])),
        ("key_padding_mask", torch.full((BATCH, KEYS), torch.nan)),
    ],
)
def test_masks_that_approximations_do_not_support_raise(method, name, mask):
    layer = module_of(method)
    with pytest.raises(ValueError, match=rf'^{name}: .*method="exact"'):
        layer(*inputs(layer), need_weights=False, **{name: mask})
    exact = module_of("exact")
    exact(*inputs(exact), need_weights=False, **{name: mask})


@pytest.mark.parametrize("method", [Exact(), Taylor(2), RandomFeatures(8)], ids=name_of)
@pytest.mark.parametrize(("n", "m", "batch"), [(0, KEYS, BATCH), (QUERIES, 0, BATCH), (QUERIES, KEYS, 0)])
def test_empty_inputs(method, n, m, batch):
    layer = module_of(method)
    output, _ = layer(*inputs(layer, n, m, batch), need_weights=False)
    assert output.shape == (batch, n, WIDTH)
    assert m or torch.equal(output, layer.out_proj.bias.expand_as(output))


# --- Linear methods ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_the_module_is_attention_between_projections(method):
    layer = module_of(method)
    tensors = inputs(layer)
    projected = [
        F.linear(x, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, w, b in zip(tensors, layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    ]
    heads = attention(*projected, method=method)
    output, _ = layer(*tensors, need_weights=False)
    assert_same(output, layer.out_proj(heads.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("method", LINEAR, ids=name_of)
def test_weights_of_a_linear_method_cost_a_warning(method):
    layer = module_of(method)
    tensors = inputs(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, none = layer(*tensors, need_weights=False, key_padding_mask=padding())
    with pytest.warns(UserWarning, match="need_weights=False") as caught:
        again, weights = layer(*tensors, key_padding_mask=padding(), average_attn_weights=False)
    assert caught[0].filename == __file__
    assert none is None
    assert_same(again, output)
    value = F.linear(tensors[2], layer.in_proj_weight.chunk(3)[2], layer.in_proj_bias.chunk(3)[2])
    heads = weights @ value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_same(layer.out_proj(heads.transpose(1, 2).flatten(2)), output)
    assert weights[1, ..., -3:].count_nonzero() == 0
    if method in NORMALIZED:
        assert_same(weights.sum(-1), torch.ones(BATCH, HEADS, QUERIES))


@pytest.mark.parametrize("method", LINEAR, ids=name_of)
def test_dropout_of_an_approximation_raises(method):
    with pytest.raises(ValueError, match=r"^dropout: .*dropout=0\.1"):
        MultiheadAttention(WIDTH, HEADS, 0.1, method=method)


def test_a_method_with_a_warning_warns_once_where_the_module_is_made():
    with pytest.warns(UserWarning, match=r"Taylor\(3\): weights can be negative") as caught:
        layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, method=Taylor(3))
    assert [warning.filename for warning in caught] == [__file__]
    model = encoder_of()
    with pytest.warns(UserWarning, match=r"Taylor\(3\): weights can be negative") as caught:
        replace_attention(model, Taylor(3))
    assert [warning.filename for warning in caught] == [__file__]
    tensors = inputs(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiheadAttention(WIDTH, HEADS, method=Taylor(2))
        model(torch.randn(2, 5, 16))
        output, _ = layer(*tensors, key_padding_mask=padding(), need_weights=False)
    with pytest.warns(UserWarning, match="need_weights=True") as caught:
        again, _ = layer(*tensors, key_padding_mask=padding())
    assert len(caught) == 1
    assert_same(again, output)


def test_an_unknown_method_raises():
    with pytest.raises(ValueError, match=r"method: .*'fast'"):
        MultiheadAttention(WIDTH, HEADS, method="fast")


WRONG = {
    "query": lambda q, k, v: ((q[..., :-1], k, v), {}),
    "key": lambda q, k, v: ((q, k[:1], v), {}),
    "value": lambda q, k, v: ((q, k, v[:, :-1]), {}),
    "query, key, value": lambda q, k, v: ((q, k[0], v[0]), {}),
    "key_padding_mask": lambda q, k, v: ((q, k, v), {"key_padding_mask": padding()[:, 1:]}),
    "key_padding_mask ": lambda q, k, v: ((q, k, v), {"key_padding_mask": padding().long()}),
    "attn_mask": lambda q, k, v: ((q, k, v), {"attn_mask": causal(KEYS, QUERIES)}),
    "attn_mask ": lambda q, k, v: ((q, k, v), {"attn_mask": causal().expand(BATCH, -1, -1)}),
}


@pytest.mark.parametrize("method", [Exact(), Taylor(2)], ids=name_of)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_named(name, method):
    layer = module_of(method)
    tensors, options = WRONG[name](*inputs(layer))
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        layer(*tensors, **options)


# --- What is saved, loaded and moved ----------------------------------------------------------------------------------


class LearnedMap(nn.Module):
    """A feature map with a parameter."""

    positive = True

    def __init__(self, width: int, features: int = 6) -> None:
        super().__init__()
        self.projection = nn.Linear(width, features)

    def size(self, width: int) -> int:
        return self.projection.out_features

    def forward(self, x: Tensor, *, is_query: bool) -> Tensor:
        return F.softplus(self.projection(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_state_goes_both_ways(method, shape):
    theirs, ours = nn.MultiheadAttention(WIDTH, HEADS, **SHAPES[shape]), None
    ours = MultiheadAttention(WIDTH, HEADS, **SHAPES[shape], method=method)
    ours.load_state_dict(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
    another = nn.MultiheadAttention(WIDTH, HEADS, **SHAPES[shape])
    missing, unexpected = another.load_state_dict(ours.state_dict(), strict=False)
    assert not missing
    assert unexpected == (["random_matrix"] if isinstance(method, RandomFeatures) else [])
    assert all(torch.equal(a, b) for a, b in zip(another.parameters(), theirs.parameters(), strict=True))


def test_a_missing_parameter_is_still_an_error():
    state = nn.MultiheadAttention(WIDTH, HEADS).state_dict()
    del state["out_proj.weight"]
    with pytest.raises(RuntimeError, match=r"out_proj\.weight"):
        MultiheadAttention(WIDTH, HEADS, method="random").load_state_dict(state)


def test_the_random_matrix_is_saved_and_used():
    first, other = module_of(RandomFeatures(16, seed=1)), module_of(RandomFeatures(16, seed=2))
    x = torch.randn(BATCH, KEYS, WIDTH)
    expected = first(x, x, x, need_weights=False)[0]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert torch.equal(state["random_matrix"], RandomFeatures(16, seed=1).draw(WIDTH // HEADS))
    parameters = {name: tensor for name, tensor in state.items() if name != "random_matrix"}
    other.load_state_dict(parameters)
    assert not torch.allclose(other(x, x, x, need_weights=False)[0], expected)
    other.load_state_dict(state)
    assert torch.equal(other(x, x, x, need_weights=False)[0], expected)
    other.load_state_dict(parameters)  # Without a matrix: back to the one of its seed.
    assert torch.equal(other.random_matrix, RandomFeatures(16, seed=2).draw(WIDTH // HEADS))


def test_a_matrix_on_meta_is_drawn_on_load():
    real = module_of(RandomFeatures(16))
    empty = MultiheadAttention(WIDTH, HEADS, batch_first=True, device="meta", method=RandomFeatures(16))
    empty = empty.to_empty(device="cpu")
    empty.random_matrix.fill_(torch.nan)
    state = {name: tensor for name, tensor in real.state_dict().items() if name != "random_matrix"}
    empty.load_state_dict(state)
    assert torch.equal(empty.random_matrix, real.random_matrix)


def test_the_random_matrix_is_moved_and_copied():
    layer = module_of(RandomFeatures(16)).to(torch.float32)
    assert layer.random_matrix.dtype == torch.float32
    assert copy.deepcopy(layer).random_matrix is not layer.random_matrix
    half = MultiheadAttention(WIDTH, HEADS, dtype=torch.float16, method="random")
    assert half.random_matrix.dtype == torch.float32
    given = torch.randn(16, WIDTH // HEADS)
    assert torch.equal(module_of(RandomFeatures(16, matrix=given)).random_matrix, given)


def test_a_matrix_of_another_size_raises():
    with pytest.raises(RuntimeError, match="random_matrix"):
        module_of(RandomFeatures(16)).load_state_dict(module_of(RandomFeatures(32)).state_dict())


def test_a_map_that_is_a_module_trains_and_is_saved():
    layer = module_of(LearnedMap(WIDTH // HEADS))  # It loads torch's state, which does not contain the map.
    names = [name for name, _ in layer.named_parameters() if name.startswith("method.")]
    assert names == ["method.projection.weight", "method.projection.bias"]
    x = torch.randn(BATCH, KEYS, WIDTH)
    output = layer(x, x, x, need_weights=False)[0]
    output.square().sum().backward()
    assert layer.method.projection.weight.grad.count_nonzero() > 0
    other = module_of(LearnedMap(WIDTH // HEADS))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, x, x, need_weights=False)[0], output)
    partial = layer.state_dict()
    del partial["method.projection.bias"]
    with pytest.raises(RuntimeError, match=r"method\.projection\.bias"):
        other.load_state_dict(partial)


@pytest.mark.parametrize("method", [*METHODS, LearnedMap], ids=name_of)
def test_copies_and_pickles(method):
    layer = module_of(LearnedMap(WIDTH // HEADS) if method is LearnedMap else method)
    x = torch.randn(BATCH, KEYS, WIDTH)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in layer.parameters()}


# --- Compiled code and vmap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Exact(), Taylor(2), RandomFeatures(8)], ids=name_of)
def test_compiled_is_eager(method):
    torch._dynamo.reset()
    layer = module_of(method).eval()
    tensors = [x.detach() for x in inputs(layer)]

    def output(*tensors: Tensor) -> Tensor:
        options = {"key_padding_mask": as_numbers(padding()), "attn_mask": causal(), "is_causal": True}
        return layer(*tensors, need_weights=False, **options)[0]

    def weights(*tensors: Tensor) -> Tensor:
        return layer(*tensors, key_padding_mask=padding())[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (output, weights):
            compiled = torch.compile(function, backend="eager", fullgraph=True)
            assert_same(compiled(*tensors), function(*tensors))


def test_compiled_an_undeclared_mask_raises():
    torch._dynamo.reset()
    layer = module_of(Taylor(2)).eval()
    tensors = [x.detach() for x in inputs(layer)]
    compiled = torch.compile(layer, backend="eager")
    with pytest.raises(Exception, match="is_causal=True"):
        compiled(*tensors, need_weights=False, attn_mask=causal())
    assert layer(*tensors, need_weights=False, attn_mask=causal())[0].isfinite().all()
    query, key, value = tensors  # A single query has no others to differ from.
    options = {"need_weights": False, "attn_mask": random_mask(1, KEYS)}
    assert_same(compiled(query[:, :1], key, value, **options), layer(query[:, :1], key, value, **options))


def test_padding_under_vmap():
    layer = module_of(Linear("elu"))
    tensors = [torch.randn(4, *x.shape) for x in inputs(layer)]
    masks = torch.stack([as_numbers(padding().roll(i, 1)) for i in range(4)])

    def output(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return layer(query, key, value, key_padding_mask=mask, need_weights=False)[0]

    expected = torch.stack([output(*each) for each in zip(*tensors, masks, strict=True)])
    assert_same(torch.func.vmap(output)(*tensors, masks), expected)
    assert_same(torch.func.vmap(output)(*tensors, masks.clamp(min=-1e9)), expected)  # Any nonzero number hides.


# --- replace_attention: what it does ----------------------------------------------------------------------------------


def encoder_of(norm_first=False, batch_first=True, dropout=0.0) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=batch_first, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch warns that it will not use nested tensors.
        encoder = nn.TransformerEncoder(layer, 2)
    for (
        parameter
    ) in encoder.parameters():  # Give the clones different parameters, and make the logits large enough to matter.
        nn.init.normal_(parameter, std=0.5)
    return encoder


def test_the_report_lists_every_layer_by_its_name_in_the_model():
    model = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True)
    report = replace_attention(model, "taylor")
    names = (
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    )
    rows = (Replacement(i, name, "nn.MultiheadAttention", Taylor(2)) for i, name in enumerate(names))
    assert report.layers == tuple(rows)
    assert (report.replaced, report.skipped) == (names, {})
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    assert all(model.get_submodule(name).method == Taylor(2) for name in names)


def test_the_report_prints_as_a_table():
    model = nn.ModuleDict({"plain": nn.MultiheadAttention(16, 2), "subclass": Doubled(16, 2)})
    replace_attention(model, LearnedMap(8))
    assert str(replace_attention(model, Auto())).splitlines() == [
        "layer  name      before      now                                  note",
        "0      plain     LearnedMap  Auto(max_error=0.05, check_rows=64)",
        "1      subclass  Doubled     unchanged                            "
        "Doubled is a subclass, which may do more than its base",
    ]


def test_only_the_selected_layers_are_replaced():
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    report = replace_attention(model, "taylor", layers=[2, 0])
    assert report.replaced == ("encoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")
    assert [layer.method for layer in report.layers] == [Taylor(2), None, Taylor(2)]
    assert type(model.decoder.layers[0].self_attn) is nn.MultiheadAttention
    assert report.skipped == {}
    assert replace_attention(model, "exact", layers=[]).replaced == ()


@pytest.mark.parametrize(("layers", "got"), [([0, 2, True], r"\[2, True\]"), ([-1], r"\[-1\]"), (1, "1")])
def test_layers_that_do_not_exist_raise(layers, got):
    model = encoder_of()
    with pytest.raises(ValueError, match=f"^layers: expected a list of numbers from 0 to 1, got {got}$"):
        replace_attention(model, "taylor", layers=layers)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)


@pytest.mark.parametrize("shape", SHAPES)
def test_everything_but_the_method_is_kept(shape):
    old = both(**SHAPES[shape])[0].to(torch.float32).eval()
    old.out_proj.weight.requires_grad_(False)
    model = nn.ModuleDict({"attention": old})
    model.train()
    old.eval()
    before = list(model.named_parameters())
    random_state = torch.get_rng_state()
    replace_attention(model, RandomFeatures(8))
    assert torch.equal(torch.get_rng_state(), random_state)
    new = model["attention"]
    assert isinstance(new, MultiheadAttention)
    assert not new.training
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(name, id(p)) for name, p in before]
    assert new.random_matrix.dtype == torch.float32
    replace_attention(model, "exact")
    tensors = [x.detach().float() for x in inputs(old)]
    torch.testing.assert_close(model["attention"](*tensors), old(*tensors))
    assert model["attention"].random_matrix is None


def test_an_optimizer_keeps_working():
    model = encoder_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    replace_attention(model, "taylor")
    x = torch.randn(2, 5, 16)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    weight = model.layers[0].self_attn.in_proj_weight
    assert weight.grad.count_nonzero() > 0
    assert weight in optimizer.state


def test_shared_modules_stay_shared():
    shared = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, nn.MultiheadAttention(16, 2)])})
    assert replace_attention(model, "taylor").replaced == ("a", "b.1")
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], MultiheadAttention)
    assert model["b"][1] is not model["a"]


def test_a_second_call_changes_the_method():
    model = encoder_of()
    first = replace_attention(model, RandomFeatures(8))
    assert replace_attention(model, LearnedMap(8)).replaced == first.replaced
    maps = {id(layer.self_attn.method) for layer in model.layers}
    assert len(maps) == 1
    second = replace_attention(model, Taylor(2))
    assert second.replaced == first.replaced
    assert all(layer.self_attn.method == Taylor(2) for layer in model.layers)
    assert model.state_dict().keys() == encoder_of().state_dict().keys()


def test_dropout_on_weights_is_removed_and_reported():
    model = encoder_of(dropout=0.1)
    with pytest.warns(UserWarning, match=r"removed from layers\.0\.self_attn, layers\.1\.self_attn") as caught:
        report = replace_attention(model, "taylor")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [layer.note for layer in report.layers] == ["dropout=0.1 removed"] * 2
    assert report.skipped == {}
    assert "Taylor(2)  dropout=0.1 removed" in str(report)
    assert model.layers[0].self_attn.dropout == 0
    assert model.layers[0].dropout1.p == 0.1
    kept = encoder_of(dropout=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (replace_attention(kept, "exact"), replace_attention(model, "taylor")):
            assert [layer.note for layer in again.layers] == ["", ""]
    again.undo()
    assert kept.layers[0].self_attn.dropout == 0.1
    report.undo()
    assert model.layers[0].self_attn.dropout == 0.1


# --- Undo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [1]])
def test_undo_restores_the_model(layers):
    model = encoder_of().eval()
    modules, flags = dict(model.named_modules()), (model.enable_nested_tensor, model.use_nested_tensor)
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    x, _ = tokens_and_padding()
    expected = model(x)
    report = replace_attention(model, Taylor(0), layers=layers)
    assert not torch.allclose(model(x), expected)
    assert flags == (True, True)
    assert (model.enable_nested_tensor, model.use_nested_tensor) == (False, False)
    report.undo()
    report.undo()  # The second call does nothing.
    assert dict(model.named_modules()) == modules
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert (model.enable_nested_tensor, model.use_nested_tensor) == flags
    assert_same(model(x), expected)


def test_a_context_manager_undoes_on_exit_also_after_an_error():
    model = encoder_of()
    with pytest.raises(RuntimeError, match="stop"), replace_attention(model, "taylor") as report:  # noqa: PT012
        assert isinstance(model.layers[1].self_attn, MultiheadAttention)
        assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
        raise RuntimeError("stop")
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)


def test_nested_replacements_are_undone_in_reverse():
    model = encoder_of()
    with replace_attention(model, RandomFeatures(8, seed=1)):
        first = model.layers[0].self_attn
        with replace_attention(model, "taylor", layers=[0]) as inner:
            assert [layer.before for layer in inner.layers] == ["RandomFeatures(8, 'positive')"] * 2
            assert model.layers[0].self_attn.method == Taylor(2)
        assert model.layers[0].self_attn is first
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


def test_undo_in_the_wrong_order_is_refused_and_changes_nothing():
    model = encoder_of()
    own = [type(module) for module in model.modules()]
    first, second = replace_attention(model, "taylor"), replace_attention(model, "linear", layers=[1])
    with pytest.raises(RuntimeError, match=r"undo: layers\.1\.self_attn was replaced again since"):
        first.undo()
    assert model.layers[1].self_attn.method == Linear("elu")
    second.undo()
    assert model.layers[1].self_attn.method == Taylor(2)
    first.undo()
    first.undo()
    assert [type(module) for module in model.modules()] == own


def test_undo_keeps_trained_and_loaded_parameters_and_the_mode():
    model, other = encoder_of().train(), encoder_of()
    report = replace_attention(model, "taylor")
    model.load_state_dict(other.state_dict(), assign=True)  # replaces the parameter objects
    model.eval()
    report.undo()
    assert not model.layers[0].self_attn.training
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_undo_keeps_shared_modules_shared():
    shared = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    replace_attention(model, "taylor").undo()
    assert model["a"] is shared
    assert model["b"][0] is shared


# --- What cannot be replaced ------------------------------------------------------------------------------------------


class Doubled(nn.MultiheadAttention):
    def forward(self, *args, **options):
        output, weights = super().forward(*args, **options)
        return 2 * output, weights


def hooked() -> nn.Module:
    module = nn.MultiheadAttention(16, 2)
    module.register_forward_hook(lambda module, inputs, outputs: None)
    return module


def overridden() -> nn.Module:
    module = nn.MultiheadAttention(16, 2)
    module.forward = lambda *args, **options: (args[0], None)
    return module


def parametrized() -> nn.Module:
    module = nn.MultiheadAttention(16, 2)
    return parametrize.register_parametrization(module, "in_proj_weight", nn.Identity())


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.MultiheadAttention(16, 2), "in_proj_weight", amount=0.3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(16, 2), "Doubled is a subclass"),
        (lambda: torch.ao.nn.quantizable.MultiheadAttention(16, 2), "is a subclass"),
        (parametrized, "is a subclass"),
        (overridden, "forward was overridden"),
        (hooked, "has hooks"),
        (pruned, "has hooks"),
    ],
)
def test_what_cannot_be_replaced_is_named(make, reason):
    odd = make()
    model = nn.ModuleDict({"odd": odd, "even": nn.MultiheadAttention(16, 2)})
    report = replace_attention(model, "taylor")
    assert model["odd"] is odd
    assert report.replaced == ("even",)
    assert list(report.skipped) == ["odd"]
    assert reason in report.skipped["odd"]
    assert f"unchanged  {report.skipped['odd']}" in str(report)
    report.undo()
    assert model["odd"] is odd


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention])
def test_an_attention_module_itself_raises(kind):
    with pytest.raises(ValueError, match=r"^model: .*state_dict"):
        replace_attention(kind(16, 2), "taylor")


def test_a_model_without_attention_raises():
    message = r"^model: looked for torch\.nn\.MultiheadAttention .* in Linear, found none; .*`with subquad\.sdpa\("
    with pytest.raises(ValueError, match=message):
        replace_attention(nn.Linear(2, 2), "taylor")


def test_a_hugging_face_model_raises_and_names_the_right_function():
    base = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})
    model = type("MyModel", (base,), {})()  # a subclass defined elsewhere
    with pytest.raises(
        ValueError, match=r"in MyModel, found none; .* subquad\.integrations\.transformers\.replace_attention$"
    ):
        replace_attention(model, "taylor")


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = encoder_of()
    take_over, calls = MultiheadAttention._take_over, []

    def fails_the_second_time(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        take_over(self, *args)

    monkeypatch.setattr(MultiheadAttention, "_take_over", fails_the_second_time)
    with pytest.raises(RuntimeError, match="no memory"):
        replace_attention(model, "taylor")
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    with pytest.raises(ValueError, match="method: "):
        replace_attention(model, "fast")


# --- replace_attention: the method really runs ------------------------------------------------------------------------


def tokens_and_padding(batch_first: bool = True) -> tuple[Tensor, Tensor]:
    x, mask = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 4:] = mask[2, 1:] = True
    return (x if batch_first else x.transpose(0, 1)), mask


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", ["", "booleans", "numbers"])
@pytest.mark.parametrize("method", [Taylor(0), RandomFeatures(16), Exact()], ids=str)
def test_eval_mode_runs_the_method(method, padded, norm_first, batch_first):
    """Also where torch would run its fused kernel or create nested tensors."""
    encoder = encoder_of(norm_first, batch_first)
    x, mask = tokens_and_padding(batch_first)
    mask = {"": None, "booleans": mask, "numbers": as_numbers(mask)}[padded]
    exact = encoder.train()(x, src_key_padding_mask=mask).detach()
    encoder.eval()
    replace_attention(encoder, method)
    trained = encoder.train()(x, src_key_padding_mask=mask).detach()
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
    assert_same(evaluated, trained)
    assert torch.allclose(evaluated, exact, rtol=1e-3, atol=1e-3) == (method == Exact())


def test_torch_would_not_have_run_it():
    """The test above can fail: in eval mode torch's layer does not call its attention."""
    encoder, calls = encoder_of().eval(), []
    x, mask = tokens_and_padding()
    for layer in encoder.layers:
        layer.self_attn.forward = lambda *args, **options: calls.append(args)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch warns that nested tensors are a prototype.
        encoder(x, src_key_padding_mask=mask)
        encoder(x)
    assert not calls


def test_an_encoder_made_with_our_layer_runs_the_method():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(16, 2, batch_first=True, method=Taylor(0))
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim"):
        encoder = nn.TransformerEncoder(layer, 2)
    x, mask = tokens_and_padding()
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
    assert_same(evaluated, encoder.train()(x, src_key_padding_mask=mask).detach())


def test_a_nested_tensor_raises():
    encoder = encoder_of().eval()
    for layer in encoder.layers:  # Layer by layer, so that the encoder's flags are not changed.
        replace_attention(layer, "taylor")
    x, mask = tokens_and_padding()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="use_nested_tensor"):
            encoder(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("method", [*LINEAR, LearnedMap], ids=name_of)
def test_a_padded_encoder_is_an_unpadded_one(method, numbers, training):
    encoder = encoder_of().train(training)
    replace_attention(encoder, LearnedMap(8) if method is LearnedMap else method)
    x, mask = tokens_and_padding()
    output = encoder(x, src_key_padding_mask=as_numbers(mask) if numbers else mask)
    for i, length in enumerate((6, 4, 1)):
        assert_same(output[i, :length], encoder(x[i : i + 1, :length])[0])


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("method", LINEAR, ids=name_of)
def test_a_causal_encoder_does_not_see_the_future(method, is_causal, numbers):
    """is_causal=None: torch's encoder detects causality; False: our module has to."""
    encoder = encoder_of().eval()
    replace_attention(encoder, method)
    x, padded = tokens_and_padding()
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    if not numbers:
        mask = mask == HIDDEN
    else:
        padded = as_numbers(padded)
    output = encoder(x, mask, src_key_padding_mask=padded, is_causal=is_causal)
    for length in (1, 4):
        assert_same(output[:1, :length], encoder(x[:1, :length], mask[:length, :length]))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_transformer_generates(method, batch_first):
    """A prefix gives the same result as one causal pass over the whole sequence; sources are padded."""
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=batch_first).eval()
    replace_attention(model, method)
    source, padded = tokens_and_padding(batch_first)
    target = torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    along = 1 if batch_first else 0
    masks = {"src_key_padding_mask": padded, "memory_key_padding_mask": padded}

    def decode(target: Tensor, source: Tensor, **masks: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[along])
        return model(source, target, tgt_mask=mask, **masks)

    with torch.no_grad():
        whole = decode(target, source, **masks)
        for length in (1, 4):
            step = decode(target.narrow(along, 0, length), source, **masks)
            assert_same(step, whole.narrow(along, 0, length))
        for i, length in enumerate((6, 4, 1)):
            one = 1 - along
            alone = decode(target.narrow(one, i, 1), source.narrow(one, i, 1).narrow(along, 0, length))
            assert_same(alone, whole.narrow(one, i, 1))


def test_an_exact_transformer_is_torch_s():
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    x, padded = tokens_and_padding()
    target, mask = torch.randn(3, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    options = {"src_key_padding_mask": padded, "memory_key_padding_mask": padded, "tgt_mask": mask}
    expected = model(x, target, **options)
    gradients = torch.autograd.grad(expected.square().sum(), model.parameters())
    replace_attention(model, "exact")
    output = model(x, target, **options)
    assert_same(output, expected)
    assert_same(torch.autograd.grad(output.square().sum(), model.parameters()), gradients)


def test_a_bias_in_a_graph_is_noticed_when_it_runs():
    layer = module_of("taylor")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    given = inputs(layer)
    hidden = torch.zeros(BATCH, KEYS)
    hidden[0, -1] = -torch.inf
    found = compiled(*given, need_weights=False, key_padding_mask=hidden)[0]
    assert_same(found, layer(*given, need_weights=False, key_padding_mask=hidden)[0])
    with pytest.raises(RuntimeError, match="does not support a bias"):
        compiled(*given, need_weights=False, key_padding_mask=hidden + 0.5)
