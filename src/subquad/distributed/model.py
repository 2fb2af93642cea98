"""Models over several processes: each rank runs the model on its slice, and attention sees the whole sequence.

    output of rank r      = the tokens of slice r of the output of one process
    loss                  = sum over ranks of (sum of the losses of the rank's tokens) / (number of tokens of all ranks)
    gradient of one process = sum over ranks of the rank's gradient

While a model is running, or autograd computes its backward pass, `subquad.attention` hands its calls over to
`subquad.distributed`. The backward pass counts because activation checkpoints run parts of the model again there. All
threads of the process take part: on a GPU, autograd has its own.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from subquad._torch_internals import in_backward, never_compiled
from subquad.attention import redirect, redirects
from subquad.distributed.attention import attend
from subquad.distributed.layouts import MIN_TOKENS, Arguments, Cut, Layout, layout_of
from subquad.distributed.peers import Peers, agree
from subquad.nn.sdpa import SPLIT

OPTIONS: dict[str, Any] = dict(
    attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, key_padding_mask=None,
    segment_ids=None, state=None, return_state=False,
)  # fmt: skip


def sequence_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    split: dict[str, int] | None = None,
    gradients: Literal["sum", "mean"] | None = None,
) -> "SequenceParallel":
    """Run a model on sequences that are split over the ranks of a group.

    Use it in a `with` statement, or as a plain call that `undo()` ends. Meanwhile, call the model on every rank of the
    group with the same whole inputs. It splits them along the sequence, computes attention over the group, and returns
    this rank's slice of the outputs; slices differ by at most one token. A loss that the model returns is that of the
    whole sequence, the same on every rank.

    What is split: of a Hugging Face model `input_ids`, `inputs_embeds`, `attention_mask` (batch, n), `position_ids`,
    `token_type_ids`, `labels` and `shift_labels`; of `nn.TransformerEncoder` `src`, `src_key_padding_mask` and a causal
    `mask`; of `MultiheadAttention` `query`, `key`, `value`, `key_padding_mask` and a causal `attn_mask`; of any other
    model what `split` names. All other arguments are passed on as they are.

    Position ids of a Hugging Face model that would count from 0 are created. A model of your own that counts positions
    must take them as an argument that `split` names. Layers that mix tokens without attention, such as convolutions
    along the sequence, are not noticed and see only the tokens of their rank. Call `backward()` inside if the model
    has activation checkpoints.

    Args:
        model: A model whose attention is computed by this library: it calls `subquad.attention`, or its attention was
            replaced by `subquad.replace_attention` or `subquad.integrations.transformers.replace_attention`. It may be
            inside `DistributedDataParallel`.
        group: The ranks that share a sequence, or a mesh with one dimension, such as `mesh["cp"]`; all by default.
        split: For models of other classes: the dimension of the sequence by the name of the argument.
        gradients: How the gradients of parameters are combined over the ranks of the group. With "sum", which is the
            default, their sum is the gradient of one process. With "mean", their mean is: `DistributedDataParallel`
            and `fully_shard` average. A model that is inside one of them needs this argument.

    Returns:
        A `SequenceParallel`, which is already active.

    Raises:
        ValueError: The model computes attention by itself, or an argument does not fit. Calls of the model raise it
            too, on every rank: for caches, for masks that cannot be split, and for inputs that differ between ranks.

    Example:
        >>> from tempfile import NamedTemporaryFile
        >>> from subquad import MultiheadAttention
        >>> file = NamedTemporaryFile()
        >>> dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        >>> layer, x = MultiheadAttention(16, 4, batch_first=True, method="taylor"), torch.randn(2, 100, 16)
        >>> with sequence_parallel(layer) as parallel:
        ...     output, _ = layer(x, x, x, need_weights=False, is_causal=True)
        ...     error = (output - parallel.shard(x)).square().sum() / x.numel()
        ...     loss = parallel.total(error)  # of all ranks
        ...     loss.backward()
        >>> output.shape  # half of the tokens on two ranks
        torch.Size([2, 100, 16])
        >>> dist.destroy_process_group()
    """
    if gradients not in (None, "sum", "mean"):
        raise ValueError(f'gradients: expected "sum" or "mean", got {gradients!r}')
    averages = [kind.__name__ for kind in type(model).__mro__ if kind.__name__ in AVERAGING]
    if averages and gradients is None:
        raise ValueError(f'gradients: expected "mean" for a model in {averages[0]}, which averages, or "sum", got None')
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    peers = Peers.of(_group_of(group))
    for each in redirects:
        if isinstance(each, SequenceParallel) and (each.model is inner or each.group != peers.group):
            what = "model: it is split already" if each.model is inner else "group: a model is split over another group"
            raise ValueError(f"{what}; end that sequence_parallel first")
    return SequenceParallel(inner, peers, layout_of(inner, split), gradients == "mean")


AVERAGING = ("DistributedDataParallel", "FSDPModule")


def _group_of(group: Any) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group  # type: ignore[no-any-return]
    if group.ndim != 1:
        raise ValueError(f'group: expected a mesh with one dimension, such as mesh["cp"], got {group}')
    return group.get_group()


class SequenceParallel:
    """A model that is split over the ranks of a group, made by `sequence_parallel`.

    Attributes:
        model: The model.
        group: The ranks that share a sequence.
        tokens: The number of tokens of the last call, on all ranks.
        segment_ids: The segments of the last call's slice, if it was one of packed sequences.
    """

    def __init__(self, model: nn.Module, peers: Peers, layout: Layout, is_averaged: bool) -> None:
        self.model, self.group = model, peers.group
        self.tokens = 0
        self._lengths: set[int] = set()  # of the sequences of the last call
        self.segment_ids: Tensor | None = None
        self._peers, self._layout, self._is_averaged = peers, layout, is_averaged
        self._cut = Cut(peers.rank, peers.size)
        self._depth = self._attended = 0  # calls of the model that have begun, and of attention
        self._undo_steps: list[Callable[[], object]] = []
        if peers.size > 1:
            self._begin()

    # --- For the user ---------------------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's slice of a tensor, such as the targets of its tokens, along the sequence.

        Raises:
            ValueError: The last call of the model was about sequences of another length: its slices would not fit.
        """
        length = tensor.shape[dim]
        if self._lengths and length not in self._lengths:
            expected = " or ".join(f"{each:,}" for each in sorted(self._lengths))
            raise ValueError(
                f"tensor: expected {expected} tokens in dimension {dim}, as in the last call of the model, got "
                f"{length:,}; pass one entry for each token, and shard the targets of another sequence after its call"
            )
        return self._cut.of(tensor, dim)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of a loss over the ranks, the same on each; for a loss that the model does not compute.

        Divide the sum of a slice's losses by the number of tokens of all ranks first. In the backward pass every rank
        computes the gradient of its own part; parameters get theirs as `gradients` says.
        """
        factor = self._peers.size if self._is_averaged else 1
        total: Tensor = _total(loss, self._peers, factor)
        return total

    def undo(self) -> None:
        """Let the model run as before. A second call does nothing."""
        while self._undo_steps:
            self._undo_steps.pop()()

    def __enter__(self) -> "SequenceParallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"SequenceParallel({type(self.model).__name__}, rank {self._cut.rank} of {self._cut.ranks})"

    # --- For attention --------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._depth > 0 or in_backward()

    @never_compiled
    def attend(self, method: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute a call of attention over the group."""
        self._attended += 1
        if options.get("state") is not None or options.get("return_state"):
            raise ValueError("state: sequence_parallel needs whole sequences; pass no state, and use_cache=False")
        return attend(method, query, key, value, self._peers, **(OPTIONS | options))[0]

    # --- Calls of the model ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        original = self.model.forward
        signature = inspect.signature(original)

        @wraps(original)
        def forward(*positional: Any, **named: Any) -> Any:
            if self._depth:  # A model that calls itself has split its inputs already.
                return original(*positional, **named)
            return self._call(original, lambda: _by_name(signature, positional, named))

        self._put("forward", forward)
        if hasattr(self.model, "generate"):
            self._put("generate", refuse_to_generate)
        redirects.append(self)
        self._undo_steps += [lambda: redirects.remove(self), guard_torch()]

    def _put(self, name: str, function: Callable[..., Any]) -> None:
        """Give the model a function of its own instead of that of its class, until `undo`."""
        attributes, before = vars(self.model), vars(self.model).get(name)

        def restore() -> None:
            if attributes.get(name) is function:  # It may have been replaced again since.
                del attributes[name]
                attributes.update({} if before is None else {name: before})

        attributes[name] = function
        self._undo_steps.append(restore)

    def _call(self, original: Callable[..., Any], arguments: Callable[[], Arguments]) -> Any:
        given, own = self._split(arguments)
        self._depth, before = self._depth + 1, self._attended
        try:
            output = original(**own)
        finally:
            self._depth -= 1
        if self._attended == before:
            raise ValueError(
                f"model: {type(self.model).__name__} has not called subquad.attention, so its tokens saw only those of "
                "their rank; replace its attention by subquad.replace_attention or route it by subquad.sdpa"
            )
        return self._layout.finished(output, given, self.total)

    @never_compiled
    def _split(self, arguments: Callable[[], Arguments]) -> tuple[Arguments, Arguments]:
        """Return the whole arguments, completed, and those of this rank's slice."""
        given, own, facts, problem = Arguments(), Arguments(), {}, None
        try:
            given = self._layout.completed(arguments())
            dims = self._layout.dimensions(given)
            parts = {name: given[name] for name in dims if given.get(name) is not None}
            self.tokens = self._length(parts, dims)
            self._lengths = {part.shape[dims[name]] for name, part in parts.items()}
            own = given | {name: self._cut.of(part, dims[name]) for name, part in parts.items()}
            facts = {name: _description(part) for name, part in parts.items()}
            segments = self._layout.segment_ids(given)
            self.segment_ids = None if segments is None else self._cut.of(segments, -1)
        except Exception as error:  # Whatever is wrong on this rank, the others must not wait for it.
            problem = error
        agree(self._peers, {"arguments": sorted(facts)} | facts if problem is None else {}, self.tokens, problem)
        return given, own

    def _length(self, parts: Arguments, dims: dict[str, int]) -> int:
        """Return the number of tokens, after checking the arguments that are split."""
        if not parts:
            raise ValueError(f"{type(self.model).__name__}: expected one of {', '.join(dims)}, got none of them")
        for name, part in parts.items():
            if not isinstance(part, Tensor) or not -part.dim() <= dims[name] < part.dim():
                found = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"{name}: expected a tensor with the sequence in dimension {dims[name]}, got {found}")
            if part.shape[dims[name]] < MIN_TOKENS * self._cut.ranks:
                raise ValueError(
                    f"{name}: expected at least {MIN_TOKENS} tokens for each of {self._cut.ranks} ranks, got "
                    f"{part.shape[dims[name]]}"
                )
        name = next(iter(parts))
        return int(parts[name].shape[dims[name]])


def _by_name(signature: inspect.Signature, positional: tuple[Any, ...], named: Arguments) -> Arguments:
    """Return the arguments of a call by name; raise TypeError if one has no name, or is given twice."""
    given = signature.bind_partial(*positional).arguments
    for name in given:
        if name in named:
            raise TypeError(f"{name}: expected it once, got it by position and by name")
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(f"{name}: expected arguments with names in the signature of the model, got *{name}")
    return given | named


def _description(tensor: Tensor) -> str:
    """Describe an argument, so that ranks notice that theirs differ; numbers only if they are free of rounding."""
    text = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
    if tensor.is_floating_point() or tensor.is_complex():
        return text
    places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
    return f"{text}, checksum {int((tensor.reshape(-1).long() * places).sum())}"


def refuse_to_generate(*_: Any, **__: Any) -> None:
    """Raise ValueError in place of a model's `generate`."""
    raise ValueError("generate: not supported by sequence_parallel, which needs whole sequences; call `undo` first")


class _Total(torch.autograd.Function):
    """The sum of a number over ranks, each of which differentiates its own part."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, peers: Peers, factor: int) -> Tensor:
        ctx.factor = factor
        return peers.summed(loss.reshape(1)).reshape(loss.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0] * ctx.factor, None, None


@never_compiled
def _total(loss: Tensor, peers: Peers, factor: int) -> Any:
    return _Total.apply(loss, peers, factor)  # type: ignore[no-untyped-call]


def running() -> SequenceParallel | None:
    """Return the split model that is running now."""
    found = redirect()
    return found if isinstance(found, SequenceParallel) else None


def guard_torch() -> Callable[[], None]:
    """Make torch's attention raise while a split model runs, unless `subquad.sdpa` routes it; return how to undo it."""
    before = F.scaled_dot_product_attention

    @wraps(before)
    def guarded(*arguments: Any, **options: Any) -> Tensor:
        if before is scaled_dot_product_attention and redirect() is not None:
            raise ValueError(SPLIT)
        return before(*arguments, **options)

    def restore() -> None:
        if F.scaled_dot_product_attention is guarded:
            F.scaled_dot_product_attention = before

    F.scaled_dot_product_attention = guarded
    return restore
