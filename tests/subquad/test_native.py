"""The native kernels against torch's own operations: forward, backward, states, and everything that a pointer can meet.

Most of what they promise is in the other files, whose forms include "fused"; here is what only they have: threads that
share a head, the two ways to compute (sums and pairs), instruction sets, strides, and the step in place.
"""

import ctypes
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from calls import INF, METHODS, attended, normal_inputs, relative, with_gradients
from subquad import Decoder, Linear, Multipole, RandomFeatures, Separable, Taylor, Window, attention, native
from subquad._engines.features.fused import numbers_of, turned
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.features.native_call import Numbers, Operands
from subquad.native import calls, loader

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.status().reason}"),
    pytest.mark.filterwarnings("ignore:.*weights can be negative"),
]

SERVED = {
    "taylor1": Taylor(1), "taylor2": Taylor(2), "taylor3": Taylor(3), "taylor4": Taylor(4),
    "positive": RandomFeatures(37), "hyperbolic": RandomFeatures(44, "hyperbolic"),
    "scaled": RandomFeatures(37, scale=-0.15), "scaled hyperbolic": RandomFeatures(44, "hyperbolic", scale=-0.1),
    "elu": Linear("elu"), "relu": Linear("relu"), "identity": Linear("identity"), "separable": Separable(),
}  # fmt: skip
served = pytest.mark.parametrize("name", SERVED)
# (batch, key heads), query heads per key head, length, width, value width
SHAPES = [((1, 1), 1, 130, 7, 3), ((1, 3), 2, 70, 5, 33), ((1, 1), 1, 64, 2, 1)]


@pytest.fixture(params=[1, 3])
def threads(request) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs_of(shape, dtype=torch.float64, std=0.7) -> list[Tensor]:
    (batch, heads), group, n, d, e = shape
    q, _, _ = normal_inputs(batch, heads * group, n=n, d=d, e=e, dtype=dtype, std=std)
    return [q, *normal_inputs(batch, heads, n=n, d=d, e=e, dtype=dtype, std=std, seed=1)[1:]]


def difference(name: str, shape, is_causal: bool, chunk: int | None, keep: Tensor | None = None) -> float:
    """The largest of output and gradients, in float64, from every pair in torch's operations."""
    inputs = inputs_of(shape)
    options = dict(is_causal=is_causal, keep=keep)
    expected = with_gradients(lambda *x: attended(SERVED[name], *x, form="dense", **options)[0], *inputs)
    found = with_gradients(lambda *x: attended(SERVED[name], *x, form="fused", chunk=chunk, **options)[0], *inputs)
    return max(relative(a, b) for a, b in zip(found, expected, strict=True))


@served
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("chunk", [None, 17])
def test_forward_and_backward_are_those_of_torch(name, is_causal, chunk, threads) -> None:
    for shape in SHAPES:
        assert difference(name, shape, is_causal, chunk) < 1e-11


@served
def test_hidden_keys(name) -> None:
    keep = torch.arange(130) % 5 != 1
    for is_causal in (True, False):
        assert difference(name, SHAPES[0], is_causal, 17, keep[None]) < 1e-11


def test_many_panels_of_features_shared_by_threads(threads) -> None:
    """Width 20 has 231 features of degree 2 and 1,771 of degree 3: several panels, some of both degrees."""
    for name in ("taylor2", "taylor3"):
        assert difference(name, ((1, 1), 1, 150, 20, 5), True, 64) < 1e-11


@pytest.mark.parametrize("name", ["taylor2", "positive", "scaled", "scaled hyperbolic", "elu", "separable"])
def test_second_derivatives(name) -> None:
    inputs = [x.requires_grad_() for x in inputs_of(((1, 1), 1, 4, 2, 2))]
    for is_causal in (True, False):

        def function(*x: Tensor, is_causal=is_causal) -> Tensor:
            return attended(SERVED[name], *x, form="fused", is_causal=is_causal)[0]

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["taylor2", "positive", "scaled", "scaled hyperbolic", "elu", "separable"])
def test_operators_keep_the_rules_of_torch(name) -> None:
    method = SERVED[name]
    q, k, v = (x.flatten(0, 1) for x in inputs_of(((1, 2), 1, 20, 4, 3), torch.float32))
    q = q[:, None]
    kernel, _, _ = kernel_of(method, q, k, 0.5)
    if name == "separable":
        numbers = Numbers(calls.MAPS["separable"], 0, 4, *kernel.root_scale, True, True)
    else:
        numbers = numbers_of(method, kernel, is_causal=True)
    for grad in (False, True):
        tensors = [x.clone().requires_grad_(grad) for x in (q, k, v)]
        operands = Operands(*tensors, None, kernel.table, turned(method, kernel.table))
        torch.library.opcheck(torch.ops.subquad.forward, (*operands, *numbers, not grad))


@served
def test_equal_calls_give_equal_bits(name, threads) -> None:
    inputs = inputs_of(((1, 3), 1, 300, 16, 16), torch.float32)
    runs = [with_gradients(lambda *x: attention(*x, is_causal=True, method=SERVED[name]), *inputs) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@served
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_strides_and_types(name, dtype) -> None:
    """Heads beside each other, reversed layouts, and memory that is not aligned."""
    inputs = [x.to(dtype) for x in inputs_of(SHAPES[0], std=0.5)]
    expected = attention(*inputs, is_causal=True, method=SERVED[name])
    shuffled = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in inputs]
    odd = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs]
    wide = [torch.cat([x, x.new_full(x.shape, INF)], -1)[..., : x.shape[-1]] for x in inputs]
    for given in (shuffled, odd, wide):
        assert torch.equal(attention(*given, is_causal=True, method=SERVED[name]), expected)


def test_strides_beyond_32_bits() -> None:
    """Distances between tokens that need more than 32 bits; untouched pages cost nothing."""
    length, apart = 9, 1 << 29
    q, k, v = (x[0, 0] for x in inputs_of(((1, 1), 1, length, 4, 4), torch.float32))
    far = torch.empty(length * apart, dtype=torch.float32).as_strided((length, 4), (apart, 1))
    far.copy_(k)
    expected = attention(q, k, v, is_causal=True, method=Taylor(2))
    assert torch.equal(attention(q, far, v, is_causal=True, method=Taylor(2)), expected)


@pytest.mark.parametrize("name", SERVED)
def test_states_pass_between_the_kernels_and_torch(name, monkeypatch) -> None:
    inputs = inputs_of(((1, 2), 2, 150, 5, 3))
    method = SERVED[name]
    whole = attended(method, *inputs, form="dense")[0]
    for order in ((True, False), (False, True), (True, True)):
        state, outputs = None, []
        for use, part in zip(order, torch.arange(150).split([90, 60]), strict=True):
            monkeypatch.setattr(native, "available", lambda use=use: use)
            output, state = attended(method, *(x[..., part, :] for x in inputs), state=state, return_state=True)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, -2), whole, rtol=1e-9, atol=1e-9)


def test_state_of_a_head_that_threads_share() -> None:
    """Long enough that the head is split; each part has to write its own sums."""
    before = torch.get_num_threads()
    q, k, v = inputs_of(((1, 1), 1, 2000, 16, 16), torch.float32, std=0.3)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for method in (Taylor(2), RandomFeatures(256)):
            found.append(attention(q, k, v, is_causal=True, method=method, return_state=True))
    torch.set_num_threads(before)
    for (a, state), (b, other) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.sums, other.sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 8])
def test_gradients_that_are_not_finite_stay_behind_the_mask(chunk) -> None:
    """A query that is NaN has a loss of NaN, which reaches the keys that it sees and no later one."""
    q, k, v = inputs_of(((1, 1), 1, 20, 4, 4))
    q[0, 0, 10] = torch.nan
    k.requires_grad_()
    for form in ("chunked", "fused"):
        loss = attended(Taylor(2), q, k, v, form=form, chunk=chunk)[0].square().sum()
        (grad,) = torch.autograd.grad(loss, k)
        assert grad[0, 0, :11].isnan().all() and not grad[0, 0, 11:].isnan().any()


@served
def test_numbers_that_are_not_finite_get_no_gradient(name) -> None:
    """The others of their token do, as if the number were 0."""
    inputs = inputs_of(((1, 1), 1, 20, 4, 4))
    for x, (token, place) in zip(inputs, ((5, 1), (9, 2), (12, 3)), strict=True):
        x[0, 0, token, place] = torch.nan
    found, expected = (
        with_gradients(lambda *x, form=form: attended(SERVED[name], *x, form=form)[0], *inputs)[1:]
        for form in ("fused", "chunked")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert found[0][0, 0, 5, 1] == found[1][0, 0, 9, 2] == found[2][0, 0, 12, 3] == 0


class Scaled:
    """A map that is not a module but holds a parameter."""

    positive = False

    def __init__(self, features: int) -> None:
        self.weight = torch.full((features,), 0.7, dtype=torch.float64, requires_grad=True)

    def size(self, width: int) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return x[..., : len(self.weight)] * self.weight


def test_a_learned_map_that_is_no_module() -> None:
    q, k, v = inputs_of(((1, 1), 1, 20, 4, 4))
    gradients = []
    for use in (True, False):
        method, state, loss = Scaled(4), None, 0.0
        for part in torch.arange(20).split(10):
            if use:
                output, state = attended(method, *(x[..., part, :] for x in (q, k, v)), state=state, return_state=True)
                loss = loss + output.sum()
        loss = loss if use else attended(method, q, k, v, form="dense")[0].sum()
        gradients.append(torch.autograd.grad(loss, method.weight)[0])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_a_map_without_features_gives_nothing() -> None:
    assert not attention(*inputs_of(SHAPES[0]), is_causal=True, method=Scaled(0)).any()


def test_many_gradients_at_once() -> None:
    q, k, v = (x.requires_grad_() for x in inputs_of(((1, 1), 1, 5, 2, 2)))
    function = lambda *x: attention(*x, is_causal=True, method=Taylor(2))
    found, expected = (torch.autograd.functional.jacobian(function, (q, k, v), vectorize=v_) for v_ in (True, False))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# --- Decoding in place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SERVED, "own"])
@pytest.mark.parametrize("group", [1, 3])
def test_decoder_is_attention_token_by_token(name, group) -> None:
    method = SERVED.get(name, METHODS["own map"])
    q, k, v = inputs_of(((2, 2), group, 40, 4, 3), torch.float32)
    whole = attention(q, k, v, is_causal=True, method=method, enable_gqa=True)
    first = [x[:, :, :30] for x in (q, k, v)]
    _, state = attention(*first, is_causal=True, method=method, enable_gqa=True, return_state=True)
    kept = state.sums.clone()
    decoder = Decoder(state, enable_gqa=True)
    outputs = [decoder(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(30, 36)]
    middle = decoder.state
    outputs += [decoder(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(36, 40)]
    torch.testing.assert_close(torch.cat(outputs, 2), whole[:, :, 30:], rtol=1e-4, atol=1e-4)
    assert torch.equal(state.sums, kept) and (middle.length, decoder.state.length) == (36, 40)
    rest = [x[:, :, 36:] for x in (q, k, v)]
    again = attention(*rest, is_causal=True, method=method, enable_gqa=True, state=middle)
    torch.testing.assert_close(again, whole[:, :, 36:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [Taylor(2), Window(6, 2), Multipole(window=5)], ids=str)
def test_decoder_takes_steps_unless_a_token_needs_the_general_path(method) -> None:
    q, k, v = inputs_of(((2, 2), 2, 12, 4, 16), torch.float32)
    _, state = attention(
        *(x[:, :, :8] for x in (q, k, v)), is_causal=True, method=method, enable_gqa=True, return_state=True
    )
    tokens = [x[:, :, 8:9] for x in (q, k, v)]
    for own in (state, state[torch.arange(2)], pickle.loads(pickle.dumps(state))):  # Copies have no room for steps yet.
        expected = attention(*tokens, is_causal=True, method=method, enable_gqa=True, state=own)
        decoder = Decoder(own, enable_gqa=True)
        torch.testing.assert_close(decoder(*tokens), expected, rtol=1e-4, atol=1e-5)
        assert decoder._steps is not None and decoder.state.length == 9
    plain = Decoder(state)
    expected = attention(tokens[0][:, :2], *tokens[1:], is_causal=True, method=method, state=state)
    torch.testing.assert_close(plain(tokens[0][:, :2], *tokens[1:]), expected, rtol=1e-4, atol=1e-5)
    assert plain._steps is not None
    with pytest.raises(ValueError, match="enable_gqa"):
        Decoder(state)(*tokens)


def test_decoder_remembers_what_is_not_finite() -> None:
    q, k, v = inputs_of(((1, 2), 1, 6, 4, 4), torch.float32)
    k[:, 1, 3] = torch.nan
    whole = attention(q, k, v, is_causal=True, method=Taylor(2))
    _, state = attention(*(x[:, :, :2] for x in (q, k, v)), is_causal=True, method=Taylor(2), return_state=True)
    decoder = Decoder(state)
    found = torch.cat([decoder(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(2, 6)], 2)
    torch.testing.assert_close(found, whole[:, :, 2:], equal_nan=True)


def test_decoder_on_a_device_by_default() -> None:
    q, k, v = inputs_of(((1, 2), 1, 6, 4, 4), torch.float32)
    _, state = attention(q, k, v, is_causal=True, method=Taylor(2), return_state=True)
    expected = Decoder(state)(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    torch.set_default_device("meta")
    try:
        found = Decoder(state)(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected)


def test_decoder_complains_as_attention_does() -> None:
    with pytest.raises(TypeError, match="state: expected the result of attention"):
        Decoder(torch.ones(3))
    q, k, v = inputs_of(((1, 2), 1, 6, 4, 4), torch.float32)
    _, state = attention(q, k, v, is_causal=True, method=Taylor(2), return_state=True)
    with pytest.raises(ValueError, match="state: "):
        Decoder(state)(q[:, :1, :1], k[:, :1, :1], v[:, :1, :1])


# --- Which library, and which instructions ----------------------------------------------------------------------------

# The library is chosen on import: each environment has a process of its own, forked once torch is loaded.
PROBE = """
import json, os, sys, torch

def probe():
    from subquad import Taylor, RandomFeatures, Decoder, attention, native
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 9, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = []
    for method in (Taylor(2), RandomFeatures(20)):
        out = attention(q, k, v, is_causal=True, method=method)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        found += [out.sum().item(), *(g.square().sum().item() for g in gradients)]
        single = [x.detach().float() for x in (q, k, v)]
        head, state = attention(*single, is_causal=True, method=method, return_state=True)
        found.append(Decoder(state)(*(x[:, :, :1] for x in single)).sum().item())
    print(json.dumps([str(native.status()), found]), flush=True)

for environment in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        probe()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, environment
"""


def probed(*environments: dict[str, str]) -> list[tuple[str, Tensor]]:
    """The status, and figures of some calls, in each environment."""
    command = [sys.executable, "-c", PROBE, json.dumps(environments)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(environments)
    return [(status, torch.tensor(figures, dtype=torch.float64)) for status, figures in map(json.loads, lines)]


def test_every_instruction_set_and_none_gives_the_same() -> None:
    sets = ("", "AVX2", "plain")
    (status, expected), *others = probed({"SUBQUAD_NATIVE": "0"}, *({"SUBQUAD_INSTRUCTIONS": name} for name in sets))
    assert status == "torch (turned off by SUBQUAD_NATIVE=0)"
    for wanted, (status, found) in zip(sets, others, strict=True):
        assert status.startswith(f"native kernels, {wanted}"), status
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


TEAMS = """
import ctypes, os, sys, threading, torch
from subquad import Taylor, attention
from subquad.native import loader
team = ctypes.CDLL(str(next(loader.Path(loader.__file__).parent.glob("_kernels*.so")))).subquad_use_team
team.argtypes = [ctypes.c_void_p]
torch.set_num_threads(3)
q, k, v = torch.randn(3, 1, 3, 400, 16, generator=torch.Generator().manual_seed(0)).unbind()
def call(): return attention(q, k, v, is_causal=True, method=Taylor(2))
torch.randn(2000, 2000).exp()  # OpenMP has its threads now
expected = call()
found = []
others = [threading.Thread(target=lambda: found.append(call())) for _ in range(3)]
for thread in others: thread.start()
for thread in others: thread.join()
team(None)
found.append(call())
team(loader.torch_team())
assert all(torch.equal(x, expected) for x in found) and len(found) == 4
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(call(), expected) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif("SUBQUAD_NATIVE" in os.environ, reason="another library than the installed one")
@pytest.mark.parametrize("limit", ["1000", "1"], ids=["whole team", "smaller team"])
def test_threads_of_torch_or_our_own_give_the_same_bits(limit) -> None:
    """From several threads at once, where the team is smaller than asked for, and in a child that has none."""
    environment = os.environ | {"OMP_THREAD_LIMIT": limit}
    subprocess.run([sys.executable, "-c", TEAMS], env=environment, check=True, timeout=300)


def test_a_library_that_cannot_be_used_is_not(tmp_path) -> None:
    contents = {"missing.so": None, "empty.so": b"", "other.so": b"not a library"}
    for name, content in contents.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    found = probed(*({"SUBQUAD_NATIVE": str(tmp_path / name)} for name in contents))
    for name, (status, _) in zip(contents, found, strict=True):
        assert status.startswith(f"torch ({name} cannot be used: "), status


def test_a_library_of_other_sources_is_not_used(monkeypatch) -> None:
    """Every constant and the size of every structure is compared when the library is loaded."""
    file = loader.Path(
        os.environ.get("SUBQUAD_NATIVE") or next(loader.Path(loader.__file__).parent.glob("_kernels*.so"))
    )
    library = ctypes.CDLL(str(file))
    library.subquad_interface.restype = ctypes.c_char_p
    assert library.subquad_interface().decode() == calls.INTERFACE
    for part in (f"call {ctypes.sizeof(calls.FeatureCall)}", f"multipole {ctypes.sizeof(calls.MultipoleCall)}"):
        assert part in calls.INTERFACE
    monkeypatch.setattr(loader, "INTERFACE", calls.INTERFACE.replace("padding 16", "padding 8"))
    with pytest.raises(RuntimeError, match="different version of the sources"):
        loader.open_library(file)


@pytest.mark.parametrize(("name", "mirror"), [
    ("SubquadTensor", calls.Strided), ("SubquadCall", calls.FeatureCall),
    ("SubquadSegments", calls.SegmentsCall), ("SubquadMultipole", calls.MultipoleCall),
    ("SubquadMultipoleGradient", calls.MultipoleGradient),
])  # fmt: skip
def test_a_structure_is_what_the_library_takes_it_for(name, mirror) -> None:
    """Names and order of the fields of call.h, which the compiler does not compare with the mirror in Python."""
    header = next(loader.Path(loader.__file__).parent.rglob("call.h")).read_text()
    body = header.split(f"struct {name} {{")[1].split("};")[0]
    code = " ".join(line.split("//")[0] for line in body.splitlines())
    fields = []
    for declaration in code.split(";"):
        if declaration.strip():
            declared = declaration.replace("const ", "").strip().split(None, 1)[1]
            fields += [part.strip().lstrip("*").split("[")[0].strip() for part in declared.split(",")]
    assert fields == [field for field, *_ in mirror._fields_]
