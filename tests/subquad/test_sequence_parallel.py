"""Models over several processes: outputs, loss and one optimizer step equal those of one process.

Four processes are started once, and make all checks. Each rank also runs the whole model by itself, and returns the
largest difference; the tests compare the differences with a tolerance.
"""

import copy
import re
import traceback
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForSequenceClassification

import subquad
from ranks import on_ranks
from subquad import MultiheadAttention
from subquad.distributed import sequence_parallel
from subquad.distributed.layouts import Cut
from subquad.integrations.transformers import replace_attention
from tiny_models import LENGTH, WORDS, inputs, long_inputs, tiny

RANKS, ROWS, WIDTH = 4, 4, 16
RATE = 0.5  # of the optimizer step


class Blocks(nn.Module):
    """A model of its own: token and position embeddings, attention by a call of `subquad.attention`, a head."""

    def __init__(self, method: Any = "taylor", is_checkpointed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.inward = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outward = nn.Linear(WIDTH, WORDS)
        self.method, self.is_checkpointed = method, is_checkpointed

    def block(self, x: Tensor, inward: nn.Module) -> Tensor:
        q, k, v = inward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = subquad.attention(q, k, v, is_causal=True, method=self.method)
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(places)
        for inward in self.inward:
            run = partial(checkpoint, self.block, use_reentrant=False) if self.is_checkpointed else self.block
            x = run(x, inward)
        return self.outward(x)


def encoder(batch_first: bool, method: Any = "taylor") -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    subquad.replace_attention(model, method)
    return model


def attention_layer(method: Any = "taylor") -> nn.Module:
    torch.manual_seed(0)
    return MultiheadAttention(WIDTH, 4, batch_first=True, method=method)


def hugging_face(name: str, method: Any = "taylor", **changes: Any) -> nn.Module:
    model = tiny(name, **changes)
    replace_attention(model, method)
    return model


def tokens(length: int, rows: int = ROWS) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


# --- Comparison with one process --------------------------------------------------------------------------------------


def difference(a: Any, b: Any) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0


def step(model: nn.Module) -> list[Tensor]:
    """Return the parameters after a step of gradient descent."""
    return [p.detach() - RATE * p.grad for p in model.parameters() if p.grad is not None]


def compare(
    model: nn.Module, given: dict[str, Any], loss_of: Callable[..., Tensor], group: Any, *, dim: int = 1,
    split: dict[str, int] | None = None, output_of: Callable[[Any], Tensor] = lambda output: output,
) -> dict[str, float]:  # fmt: skip
    """Return how far outputs, loss and parameters after one step are from those of one process.

    `loss_of(output, shard, total)` computes the loss from the output of all tokens, or of a slice.
    """
    model = model.double()
    whole, part = model, copy.deepcopy(model)
    output = whole(**given)
    loss = loss_of(output, lambda x, dim=1: x, lambda x: x)
    loss.backward()
    with sequence_parallel(part, group, split=split) as parallel:
        own = part(**given)
        own_loss = loss_of(own, parallel.shard, parallel.total)
        own_loss.backward()
    for parameter in part.parameters():
        dist.all_reduce(parameter.grad, group=parallel.group)
    found = {
        "output": difference(output_of(own), parallel.shard(output_of(output), dim)),
        "loss": difference(own_loss, loss),
        "step": max(difference(a, b) for a, b in zip(step(part), step(whole), strict=True)),
    }
    assert float(loss.detach()) > 0.1 and max(p.grad.abs().max() for p in whole.parameters()) > 1e-3
    assert not parallel._undo_steps and "forward" not in vars(part)
    return found


def mean_square(output: Any, shard: Callable[..., Tensor], total: Callable[[Tensor], Tensor], target: Tensor,
                dim: int = 1) -> Tensor:  # fmt: skip
    output = output[0] if isinstance(output, tuple) else output
    return total((output - shard(target, dim)).square().sum() / target.numel())


def cross_entropy(output: Any, shard: Callable[..., Tensor], total: Callable[[Tensor], Tensor], labels: Tensor
                  ) -> Tensor:  # fmt: skip
    logits = getattr(output, "logits", output)
    return total(F.cross_entropy(logits.flatten(0, 1), shard(labels).flatten(), reduction="sum") / labels.numel())


def own_loss(output: Any, shard: Callable[..., Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
    return output.loss


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[:, 2:4] = -100
    return labels


# --- Checks, each of which runs on all ranks --------------------------------------------------------------------------


def of_attention(group: Any, method: str) -> dict[str, float]:
    x, hidden = numbers(ROWS, 11, WIDTH), torch.zeros(ROWS, 11, dtype=torch.bool)
    hidden[1, 7:], hidden[2, :3] = True, True
    given = dict(query=x, key=x, value=x, key_padding_mask=hidden, need_weights=False, is_causal=True)
    return compare(attention_layer(method), given, partial(mean_square, target=x), group, output_of=lambda o: o[0])


def of_encoder(group: Any, method: str, batch_first: bool, is_causal: bool) -> dict[str, float]:
    x, hidden = numbers(*((ROWS, 11) if batch_first else (11, ROWS)), WIDTH), torch.zeros(ROWS, 11, dtype=torch.bool)
    hidden[1, 7:] = True
    mask = torch.ones(11, 11, dtype=torch.bool).triu(1) if is_causal else None
    given = dict(src=x, mask=mask, src_key_padding_mask=hidden)
    loss = partial(mean_square, target=torch.ones_like(x), dim=1 if batch_first else 0)
    return compare(encoder(batch_first, method), given, loss, group, dim=1 if batch_first else 0)


def of_blocks(group: Any, method: str, is_checkpointed: bool = False) -> dict[str, float]:
    ids = tokens(13)
    given = dict(tokens=ids, places=torch.arange(13))
    loss, split = partial(cross_entropy, labels=ids.flip(1)), {"tokens": 1, "places": 0}
    return compare(Blocks(method, is_checkpointed), given, loss, group, split=split)


def of_language_model(
    group: Any, name: str, method: str, side: str | None = None, is_checkpointed: bool = False
) -> dict[str, float]:
    given = long_inputs(side) if name in ("mistral", "gemma2", "gpt_oss") else inputs(name, side)
    given["labels"] = labels_of(given["input_ids"])
    model = hugging_face(name, method)
    if is_checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return compare(model, given, own_loss, group, output_of=lambda o: o.logits)


def of_packed(group: Any, method: str) -> dict[str, float]:
    ids = tokens(13)
    places = torch.cat([torch.arange(4), torch.arange(7), torch.arange(2)]).expand(ROWS, -1)
    given = dict(input_ids=ids, position_ids=places, labels=labels_of(ids), use_cache=False)
    return compare(hugging_face("llama", method), given, own_loss, group, output_of=lambda o: o.logits)


def of_masked_language_model(group: Any, method: str) -> dict[str, float]:
    given = inputs("bert", "right")
    loss = partial(cross_entropy, labels=given["input_ids"].flip(1))
    return compare(hugging_face("bert", method), given, loss, group, output_of=lambda o: o.logits)


def of_routed(group: Any) -> dict[str, float]:
    """A model that calls torch's function, which `sdpa` routes to a method; begun before and after."""

    class Plain(Blocks):
        def block(self, x: Tensor, inward: nn.Module) -> Tensor:
            q, k, v = inward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    model, given = Plain().double(), dict(tokens=tokens(13), places=torch.arange(13))
    with subquad.sdpa("taylor"):
        whole = model(**given)
        with sequence_parallel(model, group, split={"tokens": 1, "places": 0}) as parallel:
            first = model(**given)
    with sequence_parallel(model, group, split={"tokens": 1, "places": 0}), subquad.sdpa("taylor"):
        second = model(**given)
    return {"output": max(difference(each, parallel.shard(whole)) for each in (first, second))}


def of_compiled(group: Any) -> dict[str, float]:
    """A program that was compiled for one process notices that its tokens are split, and that they no longer are."""
    model, given = Blocks().double(), dict(tokens=tokens(13), places=torch.arange(13))
    whole = model(**given)
    model.block = torch.compile(model.block, backend="eager")
    found = [difference(model(**given), whole)]
    with sequence_parallel(model, group, split={"tokens": 1, "places": 0}) as parallel:
        found.append(difference(model(**given), parallel.shard(whole)))
    return {"output": max(*found, difference(model(**given), whole))}


def of_data_parallel(mesh: DeviceMesh, world: dist.ProcessGroup | None, name: str) -> dict[str, float]:
    """Rows over "dp", tokens over "cp"; DistributedDataParallel over both, or fully_shard."""
    ids = tokens(LENGTH)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    whole = hugging_face("llama").double()
    part = copy.deepcopy(whole)
    loss = whole(**given).loss
    loss.backward()
    rows = ids.shape[0] // mesh["dp"].size()
    own = slice(mesh["dp"].get_local_rank() * rows, (mesh["dp"].get_local_rank() + 1) * rows)
    if name == "ddp":
        model: nn.Module = DistributedDataParallel(part, process_group=world)
    else:
        for layer in part.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(part, mesh=mesh)
    with sequence_parallel(model, mesh["cp"], gradients="mean"):
        own_loss = model(**{name: x[own] for name, x in given.items()}).loss
        own_loss.backward()
    mean = own_loss.detach().clone()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    gradients = [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in part.parameters()]
    wanted = [p.grad for p in whole.parameters()]
    return {
        "loss": difference(mean / mesh["dp"].size(), loss),
        "gradient": max(difference(a, b) for a, b in zip(gradients, wanted, strict=True)),
    }


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    return "no error"


def refusals(group: Any) -> dict[str, str]:
    """Return the message of each call that is refused."""
    llama, ids = hugging_face("llama"), tokens(LENGTH)
    blocks = Blocks()
    places = torch.arange(13)

    def call(model: nn.Module, *, split: dict[str, int] | None = None, **given: Any) -> str:
        def run() -> None:
            with sequence_parallel(model, group, split=split):
                model(**given)

        return message(run)

    def begin(model: nn.Module, **options: Any) -> str:
        return message(lambda: sequence_parallel(model, group, **options).undo())

    def generate() -> None:
        with sequence_parallel(llama, group):
            llama.generate(ids, max_new_tokens=2)

    def twice() -> None:
        with sequence_parallel(llama, group):
            sequence_parallel(llama, group)

    def late() -> None:
        model = Blocks(is_checkpointed=True)
        with sequence_parallel(model, group, split={"tokens": 1, "places": 0}):
            loss = model(tokens(13), places).sum()
        loss.backward()

    def in_order(*given: Any, **named: Any) -> None:
        with sequence_parallel(blocks, group, split={"tokens": 1, "places": 0}):
            blocks(*given, **named)

    def shard_shifted_targets() -> None:
        with sequence_parallel(blocks, group, split={"tokens": 1, "places": 0}) as parallel:
            assert parallel.shard(tokens(10)).shape[1] == 5  # before any call
            blocks(tokens(13), places)
            assert parallel.shard(places, 0).shape[0] in (6, 7)
            parallel.shard(tokens(13)[:, 1:])

    class Plain(nn.Module):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    def left_to_torch() -> None:
        with subquad.sdpa("taylor"), sequence_parallel(model := Plain(), group, split={"x": 1}):
            model(x, torch.ones(1))

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1)

    x = numbers(2, 9, 16)
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[2, 3] = True
    return {
        "not replaced": begin(tiny("llama")),
        "partly replaced": begin(_partly_replaced()),
        "torch's attention": begin(nn.TransformerEncoderLayer(16, 4)),
        "recurrent": begin(nn.Sequential(nn.LSTM(4, 4), MultiheadAttention(16, 4)), split={"input": 1}),
        "unknown arguments": begin(blocks),
        "known arguments": begin(llama, split={"input_ids": 1}),
        "nested": begin(Wrapped(tiny("llama")), split={"x": 1}),
        "head": begin(_classifier()),
        "encoder and decoder": begin(hugging_face("bart")),
        "gradients of DDP": begin(DistributedDataParallel(blocks, process_group=group)),
        "gradients": begin(blocks, split={"tokens": 1}, gradients="max"),
        "twice": message(twice),
        "generate": message(generate),
        "cache": call(llama, input_ids=ids, use_cache=True),
        "last logits": call(llama, input_ids=ids, logits_to_keep=1),
        "matrix": call(llama, input_ids=ids, attention_mask=torch.ones(ROWS, 1, LENGTH, LENGTH)),
        "two lengths": call(llama, input_ids=ids, attention_mask=torch.ones(ROWS, LENGTH + 1)),
        "short": call(llama, input_ids=ids[:, :3]),
        "different inputs": call(llama, input_ids=ids + dist.get_rank(group)),
        "labels of a mean": call(hugging_face("bert"), input_ids=ids, labels=ids),
        "mask of pairs": call(encoder(True), src=x.float(), mask=mask),
        "weights": call(attention_layer(), query=x.float(), key=x.float(), value=x.float()),
        "dropout": call(_with_dropout(), src=x.float()),
        "torch's function": call(Plain(), split={"x": 1}, x=x),
        "left to torch by sdpa": message(left_to_torch),
        "no attention": call(Other(), split={"x": 1}, x=x),
        "auto": call(Blocks("auto"), split={"tokens": 1, "places": 0}, tokens=tokens(13), places=places),
        "checkpoint outside": message(late),
        "added key": begin(MultiheadAttention(16, 4, add_zero_attn=True)),
        "learned key": begin(MultiheadAttention(16, 4, add_bias_kv=True)),
        "third argument": message(lambda: in_order(tokens(13), places, places)),
        "shifted targets": message(shard_shifted_targets),
        "argument twice": message(lambda: in_order(tokens(13), tokens=tokens(13), places=places)),
    }


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _partly_replaced() -> nn.Module:
    model = tiny("llama")
    replace_attention(model, "taylor", layers=[1])
    return model


def _classifier() -> nn.Module:
    model = LlamaForSequenceClassification(tiny("llama").config)
    replace_attention(model, "taylor")
    return model


def _with_dropout() -> nn.Module:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 16, batch_first=True), 1, enable_nested_tensor=False
    )
    subquad.replace_attention(model, "exact")
    return model.train()


MODELS: dict[str, tuple[Callable[..., dict[str, float]], dict[str, Any], float]] = {
    "attention layer": (of_attention, dict(method="taylor"), 1e-10),
    "encoder": (of_encoder, dict(method="taylor", batch_first=True, is_causal=True), 1e-10),
    "encoder, length first": (of_encoder, dict(method="random:16", batch_first=False, is_causal=False), 1e-10),
    "blocks": (of_blocks, dict(method="taylor"), 1e-10),
    "blocks with checkpoints": (of_blocks, dict(method="taylor", is_checkpointed=True), 1e-10),
    # The loss of transformers is computed in float32.
    "llama": (of_language_model, dict(name="llama", method="taylor"), 1e-5),
    "llama, padded": (of_language_model, dict(name="llama", method="taylor", side="right"), 1e-5),
    "llama with checkpoints": (of_language_model, dict(name="llama", method="taylor", is_checkpointed=True), 1e-5),
    "llama, packed": (of_packed, dict(method="taylor"), 1e-5),
    "gpt2, padded": (of_language_model, dict(name="gpt2", method="linear:elu", side="left"), 1e-5),
    "bert, padded": (of_masked_language_model, dict(method="taylor"), 1e-10),
    "attention layer, exact": (of_attention, dict(method="exact"), 1e-10),
    "encoder, exact": (of_encoder, dict(method="exact", batch_first=True, is_causal=True), 1e-10),
    "llama, exact": (of_language_model, dict(name="llama", method="exact", side="right"), 1e-5),
    "llama, exact, packed": (of_packed, dict(method="exact"), 1e-5),
    "llama, multipole": (of_language_model, dict(name="llama", method="multipole:2", side="left"), 1e-5),
    "mistral, exact": (of_language_model, dict(name="mistral", method="exact", side="right"), 1e-5),
    "mistral": (of_language_model, dict(name="mistral", method="taylor"), 1e-5),
    "gemma2": (of_language_model, dict(name="gemma2", method="taylor", side="right"), 1e-5),
    "routed": (of_routed, dict(), 1e-10),
    "compiled": (of_compiled, dict(), 1e-10),
}
# A slice of mistral's tokens on four ranks fits into its window, all of them do not.
ON_FOUR = ("llama, padded", "blocks", "mistral")
MESHES = {"ddp": [(1, 2), (2, 1), (2, 2)], "fsdp": [(1, 2), (2, 2)]}


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # Later checks are made all the same.
        return traceback.format_exc()


def everything(rank: int) -> dict[str, Any]:
    """Make all checks on one of four ranks; groups of two make theirs side by side."""
    torch.manual_seed(rank)
    meshes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")) for shape in [(2, 2), (1, 4)]}
    two, four = meshes[2, 2]["cp"], meshes[1, 4]["cp"]
    found = {}
    for name, (function, options, _) in MODELS.items():
        found[name, 2] = attempt(partial(function, two, **options))
    for name in ON_FOUR:
        function, options, _ = MODELS[name]
        found[name, 4] = attempt(partial(function, four.get_group(), **options))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for kind, shapes in MESHES.items():
        for shape in shapes:
            found[kind, shape] = attempt(partial(of_mesh, kind, shape, rank, halves))
    found["refusals"] = attempt(partial(refusals, two.get_group()))
    return found


def of_mesh(kind: str, shape: tuple[int, int], rank: int, halves: list[dist.ProcessGroup]) -> dict[str, float]:
    """Compare dp x cp ranks: all four, or two halves side by side."""
    if shape == (2, 2):
        return of_data_parallel(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")), None, kind)
    three = init_device_mesh("cpu", (2, *shape), mesh_dim_names=("half", "dp", "cp"))
    return of_data_parallel(three["dp", "cp"], halves[rank // 2], kind)


@cache
def results() -> list[dict[str, Any]]:
    return on_ranks(everything, RANKS)


REFUSED = {
    "not replaced": "LlamaForCausalLM: model.layers.0.self_attn computes its attention by itself",
    "partly replaced": "model.layers.0.self_attn computes its attention by itself",
    "torch's attention": "self_attn is torch.nn.MultiheadAttention, .* call subquad.replace_attention",
    "recurrent": r"0 \(LSTM\) passes its state from token to token",
    "unknown arguments": "split: expected the arguments of Blocks .* got None",
    "known arguments": "split: expected None for LlamaForCausalLM",
    "nested": "got Wrapped; .* pass LlamaForCausalLM itself",
    "head": "LlamaForSequenceClassification cannot be split over ranks: its head may read single tokens",
    "encoder and decoder": "BartForConditionalGeneration cannot be split over ranks: it has an encoder and a decoder",
    "gradients of DDP": 'gradients: expected "mean" for a model in DistributedDataParallel',
    "gradients": 'gradients: expected "sum" or "mean", got \'max\'',
    "twice": "it is split already",
    "generate": "generate: not supported by sequence_parallel",
    "cache": "use_cache: not supported by sequence_parallel",
    "last logits": "logits_to_keep: not supported by sequence_parallel",
    "matrix": r"attention_mask: expected a tensor of shape \(batch, n\), got shape \(4, 1, 9, 9\)",
    "two lengths": "expected one length of all arguments, got {'input_ids': 9, 'attention_mask': 10",
    "short": "input_ids: expected at least 2 tokens for each of 2 ranks, got 3",
    "different inputs": "input_ids: expected the same on all ranks",
    "labels of a mean": "labels: BertForMaskedLM computes its loss as a mean over the tokens of a slice",
    "mask of pairs": "mask: expected a causal matrix or None",
    "weights": "need_weights=True is not supported by subquad.distributed.sequence_parallel",
    "dropout": "dropout_p: expected 0 on several ranks, got 0.1",
    "torch's function": "torch's function would see only the tokens of this rank",
    "left to torch by sdpa": "torch's function would see only the tokens of this rank",
    "no attention": "Other has not called subquad.attention",
    "auto": "method: Auto needs the whole sequence, which no rank holds",
    "checkpoint outside": "A different number of tensors was saved",
    "added key": "MultiheadAttention adds a key to those of the sequence",
    "learned key": "MultiheadAttention adds a key to those of the sequence",
    "third argument": "too many positional arguments",
    "shifted targets": "tensor: expected 13 tokens in dimension 1, as in the last call of the model, got 12; pass one",
    "argument twice": "tokens: expected it once, got it by position and by name",
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in MODELS), *((name, 4) for name in ON_FOUR)])
def test_a_model_over_ranks_equals_one_process(name, ranks) -> None:
    for found in results():
        differences, tolerance = found[name, ranks], MODELS[name][2]
        assert isinstance(differences, dict), differences
        assert max(differences.values()) < tolerance, differences


@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for kind, shapes in MESHES.items() for shape in shapes])
def test_data_and_sequence_parallel_gradients_equal_those_of_one_process(kind, shape) -> None:
    for found in results():
        differences = found[kind, shape]
        assert isinstance(differences, dict), differences
        assert differences["gradient"] < 1e-10 and differences["loss"] < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_on_every_rank(name) -> None:
    for found in results():
        assert isinstance(found["refusals"], dict), found["refusals"]
        assert re.search(REFUSED[name], found["refusals"][name]), found["refusals"][name]


def test_every_refusal_is_checked() -> None:
    assert results()[0]["refusals"].keys() == REFUSED.keys()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_runs_the_model_as_it_is() -> None:
    model, x = attention_layer(), numbers(2, 9, WIDTH).float()
    expected = model(x, x, x, need_weights=False)[0]
    with sequence_parallel(model) as parallel:
        assert torch.equal(model(x, x, x, need_weights=False)[0], expected)
        assert torch.equal(parallel.shard(x), x) and float(parallel.total(torch.tensor(2.0))) == 2.0
    with pytest.raises(ValueError, match="group: expected a mesh with one dimension"):
        sequence_parallel(model, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp")))


def test_slices_differ_by_at_most_one_token() -> None:
    for length in range(4, 12):
        slices = [Cut(rank, 4).bounds(length) for rank in range(4)]
        assert [start for start, _ in slices] + [length] == [0, *(end for _, end in slices)]
        assert {end - start for start, end in slices} <= {length // 4, length // 4 + 1}


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        sequence_parallel(attention_layer())
