"""Recorded programs: torch.export, ONNX, AOTInductor, torch.compile, torch.jit.trace; and tensors without numbers."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad
from calls import METHODS as CALLED
from calls import relative
from subquad import Auto, Exact, Multipole, RandomFeatures, Taylor, Window, attention, native
from subquad.native import loader
from subquad.native.calls import MAPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weights can be negative"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

FEATURES = {name: method for name, method in CALLED.items() if name not in ("odd taylor", "own map")}
FEATURES |= {"diagonal": Taylor(2, basis="diagonal")}
METHODS = FEATURES | {"window": Window(8), "window with sinks": Window(8, sinks=2)}
DATA_DEPENDENT = {"multipole": Multipole(), "auto": Auto()}
SIZES = [(1, 1), (2, 63), (1, 64), (3, 65), (2, 200), (1, 4096)]  # batch and length
HAS_KERNELS = native.available()
IS_SLOW = "SUBQUAD_SLOW_TESTS" in os.environ  # Recording takes seconds for each method.
COMPILED = METHODS if IS_SLOW else ("taylor", "positive", "elu", "window with sinks")
IN_ONNX = METHODS if IS_SLOW else ("taylor", "window with sinks")


class Model(nn.Module):
    """Causal and padded, and neither, by some methods."""

    def __init__(self, *methods) -> None:
        super().__init__()
        self.methods = methods

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            attention(q, k, v, is_causal=mask is not None, method=method, key_padding_mask=mask)
            for method in self.methods
            for mask in (None, keep)
        )


def inputs(batch: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q, k, v = torch.randn(3, batch, 2, n, 8, generator=generator).mul(0.4).unbind()
    keep = torch.rand(batch, n, generator=generator) > 0.3
    keep[:, 0] = n > 1  # The first row of a causal call sees a key; a single hidden key leaves a row without any.
    return q, k, v + 1, keep


def exported(*methods) -> torch.export.ExportedProgram:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=4096)
    shapes = ({0: batch, 2: length},) * 3 + ({0: batch, 1: length},)
    return torch.export.export(Model(*methods), inputs(3, 17), dynamic_shapes=shapes)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if "subquad" in str(node.target)}


def check(function, model: Model, sizes=SIZES) -> None:
    for batch, n in sizes:
        for found, expected in zip(function(*inputs(batch, n)), model(*inputs(batch, n)), strict=True):
            assert found.shape == expected.shape
            if expected.any():
                assert relative(found, expected) < 1e-5, (batch, n)
            else:
                assert not found.any()


@pytest.mark.parametrize("name", METHODS)
def test_one_program_serves_every_length_and_batch(name) -> None:
    """With the kernels, and after their operators were decomposed to those of torch."""
    program, model = exported(METHODS[name]), Model(METHODS[name])
    by_kernels = HAS_KERNELS and name not in ("diagonal", "trigonometric", "separable")
    wanted = {f"subquad.{'sparse' if 'window' in name else 'forward'}.default"} if by_kernels else set()
    assert operators(program) == wanted
    check(program.module(), model)
    if by_kernels and name in ("taylor", "hyperbolic", "window with sinks"):
        plain = program.run_decompositions(subquad.decompositions())
        assert operators(plain) == set()
        check(plain.module(), model, SIZES[:-1])


@pytest.mark.parametrize("name", ["taylor", "window with sinks"])
def test_a_plain_program_is_linear_in_the_length(name, torch_alone) -> None:
    """No tensor of the program is as large as all pairs of a long sequence."""
    nodes = [node for node in exported(METHODS[name]).graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    batch, _, length, _ = next(node.meta["val"].shape for node in nodes if node.name == "q")
    long = 1 << 16
    for node in nodes:
        count = 1
        for size in node.meta["val"].shape:
            known = {batch.node.expr: 1, length.node.expr: long}
            count *= int(size.node.expr.subs(known)) if isinstance(size, torch.SymInt) else 1
        assert count < long**2 / 1000, node


@pytest.mark.skipif(not HAS_KERNELS, reason="needs the native kernels")
def test_a_saved_program_is_loaded_after_one_import(tmp_path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(exported(Taylor(2)), file)
    check(torch.export.load(file).module(), Model(Taylor(2)), SIZES[:3])
    code = "import sys, torch\nif len(sys.argv) > 2: import subquad\ntorch.export.load(sys.argv[1])"

    def load(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", code, str(file), *words], capture_output=True, text=True)

    assert load("import").returncode == 0
    without = load()
    assert without.returncode != 0 and "subquad" in without.stderr


def test_onnx_runtime_computes_the_same_at_every_length() -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    methods = [METHODS[name] for name in IN_ONNX]
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=4096)
    shapes = ({0: batch, 2: length},) * 3 + ({0: batch, 1: length},)
    program = torch.onnx.export(Model(*methods), inputs(3, 17), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert not any("subquad" in (node.domain + node.op_type) for node in program.model.graph)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        found = session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))
        return [torch.from_numpy(x) for x in found]

    check(run, Model(*methods))


@pytest.mark.skipif(not IS_SLOW, reason="takes a minute; set SUBQUAD_SLOW_TESTS=1")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["kernels", "plain"])
def test_an_aotinductor_package_computes_the_same(tmp_path, kind) -> None:
    methods = (Taylor(2), RandomFeatures(16), Window(8, sinks=2))
    program = exported(*methods)
    program = program if kind == "kernels" else program.run_decompositions(subquad.decompositions())
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    check(torch._inductor.aoti_load_package(path), Model(*methods))


@pytest.mark.parametrize("name", COMPILED)
def test_every_feature_method_and_window_compile_as_one_graph(name) -> None:
    """Forward and backward, with the kernels where they serve; `test_transforms.py` has constant sizes, and states."""
    method = METHODS[name]

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, method=method)

    torch.compiler.reset()
    compiled = torch.compile(compute, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (16, 70):  # 16 is also the number of random features.
        given = [x.requires_grad_() for x in inputs(2, n)[:3]]
        found, expected = compiled(*given), compute(*given)
        assert relative(found, expected) < 1e-5
        gradients = [torch.autograd.grad(out.sin().sum(), given) for out in (found, expected)]
        for a, b in zip(*gradients, strict=True):
            assert relative(a, b) < 1e-4


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_data_dependent_method_breaks_the_graph(name, is_dynamic) -> None:
    method = DATA_DEPENDENT[name]

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1, k, v, is_causal=True, method=method) + 1

    q, k, v, _ = inputs(1, 150)
    torch.compiler.reset()
    compiled = torch.compile(compute, dynamic=is_dynamic, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), compute(q, k, v))
    torch.compiler.reset()
    whole = torch.compile(compute, dynamic=is_dynamic, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"method: {type(method).__name__} .*(expected a feature|name a) method"):
        whole(q, k, v)


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_data_dependent_method_is_not_exported_or_traced(name) -> None:
    method = DATA_DEPENDENT[name]
    given = inputs(1, 150)[:3]

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, is_causal=True, method=method)

    with pytest.raises(ValueError, match=r"torch\.jit\.trace"):
        torch.jit.trace(Attend(), given)
    with pytest.raises(ValueError, match=r"torch\.export"):
        torch.export.export(Attend(), given)
    assert Attend()(*given).isfinite().all()


@pytest.mark.parametrize("kernels", ["kernels", "plain"])
@pytest.mark.parametrize("name", METHODS)
def test_a_trace_serves_other_lengths(name, kernels, monkeypatch) -> None:
    if kernels == "plain":
        monkeypatch.setattr(native, "available", lambda: False)
    model = Model(METHODS[name])
    check(torch.jit.trace(model, inputs(3, 17), check_trace=False), model, SIZES[:-1])


SHAPED = METHODS | DATA_DEPENDENT | {"exact": Exact()}


@pytest.mark.parametrize("name", SHAPED)
def test_meta_tensors_give_shapes(name) -> None:
    q, k, v = torch.empty(3, 2, 4, 20, 8, device="meta", dtype=torch.bfloat16).unbind()
    keep = torch.ones(2, 20, dtype=torch.bool, device="meta")
    for is_causal in (False, True):
        for mask in (None, keep):
            out = attention(q, k, v[..., :6], is_causal=is_causal, method=SHAPED[name], key_padding_mask=mask)
            assert (out.shape, out.dtype, out.device.type) == ((2, 4, 20, 6), torch.bfloat16, "meta")
    if name in METHODS:
        _, state = attention(q, k, v, is_causal=True, method=SHAPED[name], return_state=True)
        assert state.length == 20 and {x.device.type for x in state._tensors().values()} == {"meta"}
        wide = [x.float().requires_grad_() for x in (q, k, v)]
        attention(*wide, is_causal=True, method=SHAPED[name]).sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in wide)


@pytest.mark.parametrize("name", SHAPED)
def test_fake_tensors_give_shapes(name) -> None:
    with FakeTensorMode():
        q, k, v = torch.randn(3, 2, 4, 20, 8).unbind()
        for is_causal in (False, True):
            out = attention(q, k, v[..., :6], is_causal=is_causal, method=SHAPED[name])
            assert (out.shape, out.dtype, out.device.type) == ((2, 4, 20, 6), torch.float32, "cpu")


def test_a_trace_refuses_lengths_that_it_was_not_made_for() -> None:
    q, k, v = torch.randn(3, 1, 2, 100, 8).unbind()
    traced = torch.jit.trace(lambda *x: attention(*x, is_causal=True, method="taylor"), (q, k, v))
    for n, m in ((130, 90), (90, 130), (4000, 10)):
        other = torch.randn(1, 2, n, 8), *torch.randn(2, 1, 2, m, 8).unbind()
        with pytest.raises(RuntimeError, match=r"as many queries as keys|size of tensor|must match|invalid for input"):
            traced(*other)
    with pytest.raises(ValueError, match="different numbers of queries and keys"):
        torch.jit.trace(lambda *x: attention(*x, is_causal=True, method="taylor"), (q[:, :, :50], k, v))


@pytest.mark.skipif(not HAS_KERNELS, reason="needs the native kernels")
def test_the_operator_checks_its_shapes() -> None:
    q, k, v = torch.randn(2, 1, 20, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 4)
    numbers = (MAPS["elu"], 0, 8, 1.0, 1.0, True, True, 0, 0.0, False, False)
    rest = (None,) * 7
    assert torch.ops.subquad.forward(q, k, v, *rest, *numbers)[0].shape == (2, 1, 20, 4)
    for other in ((q[:, :, :9], k, v), (q[..., :5], k, v), (q, k[:1], v), (q, k, v[:, :9])):
        with pytest.raises(ValueError, match="subquad::forward: "):
            torch.ops.subquad.forward(*other, *rest, *numbers)


def test_the_operator_of_a_program_recorded_with_kernels_names_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(loader, "FOUND", loader.FOUND._replace(library=None))
    q, k, v = torch.randn(2, 1, 20, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 4)
    with pytest.raises(RuntimeError, match="recorded with the native kernels, which are not available here"):
        torch.ops.subquad.forward(q, k, v, *(None,) * 7, MAPS["elu"], 0, 8, 1.0, 1.0, True, True, 0, 0.0, False, False)


def test_a_batch_without_a_largest_size_is_exported():
    """No check of sizes, such as that of the memory, may become a guard of the program."""

    class Attending(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, is_causal=True, method="taylor")

    inputs = tuple(torch.randn(3, 2, 2, 8, 4).unbind())
    shapes = ({0: torch.export.Dim("batch")},) * 3
    program = torch.export.export(Attending(), inputs, dynamic_shapes=shapes)
    wide = tuple(torch.randn(3, 500, 2, 8, 4).unbind())
    torch.testing.assert_close(program.module()(*wide), Attending()(*wide), rtol=1e-5, atol=1e-5)
