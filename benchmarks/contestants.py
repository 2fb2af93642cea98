"""Engines that read a context and then one token at a time, behind one interface: transformers and llama.cpp.

    contestant.prefill(tokens)    reads a context from the beginning; returns the most likely next token
    contestant.step(token)        reads one more token; returns the most likely next token

Only the logits of the last token are computed. `Ways` times the two ways to decode with a transformers model.
"""

import copy
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Contestant(Protocol):
    """An engine with its own cache."""

    name: str

    def prefill(self, tokens: Tensor) -> int: ...

    def step(self, token: int) -> int: ...

    def forget(self) -> None:
        """Free the cache."""


def with_method(model: Any, method: Any) -> Any:
    """Return a copy of a model with the same parameters, since the attention is replaced in place."""
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    if method is not None:
        from subquad.integrations.transformers import replace_attention

        replace_attention(copied, method)
    return copied


class Transformers:
    """A transformers model.

    Args:
        name: The name of the contestant.
        model: The model.
        method: The method for `replace_attention`, or None for the model's own attention.
        passes_cache: Whether the loop passes an empty cache to the first call, or lets the model create one.
    """

    def __init__(self, name: str, model: Any, method: str | None = None, passes_cache: bool = True) -> None:
        self.name, self.passes_cache, self.cache = name, passes_cache, None
        self.model = with_method(model, method)

    def prefill(self, tokens: Tensor) -> int:
        self.cache = self._empty_cache() if self.passes_cache else None
        return self._read(tokens)

    def step(self, token: int) -> int:
        return self._read(torch.tensor([[token]]))

    def forget(self) -> None:
        self.cache = None

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> int:
        out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return int(out.logits[0, -1].argmax())

    def _empty_cache(self) -> Any:
        """Return a cache of states for a replaced attention, otherwise of keys."""
        from subquad.integrations.transformers import state_cache

        return state_cache(self.model)


class Ways:
    """A transformers model that decodes by `generate`, or in the usual loop; both return the seconds of each token.

    Args:
        name: The name of the method.
        model: The model.
        method: The method for `replace_attention`, or None for the model's own attention.
    """

    def __init__(self, name: str, model: Any, method: Any) -> None:
        self.name, self.model, self.times = name, with_method(model, method), [0.0]

    def generate(self, context: Tensor, tokens: int) -> list[float]:
        self.times = []
        self.model.generate(context, attention_mask=torch.ones_like(context), max_new_tokens=tokens + 1,
                            min_new_tokens=tokens + 1, do_sample=False, streamer=self)  # fmt: skip
        return self._intervals()

    def put(self, _: Tensor) -> None:
        """Record the time of a token; called by `generate`, first with the context."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; called by `generate`."""

    @torch.no_grad()
    def loop(self, context: Tensor, tokens: int) -> list[float]:
        self.times, cache = [0.0], None
        for _ in range(tokens + 1):
            out = self.model(context, past_key_values=cache, use_cache=True, logits_to_keep=1)
            context, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            self.put(context)
        return self._intervals()

    def _intervals(self) -> list[float]:
        """Return the seconds between tokens, without the first one, which comes with the context."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]


class LlamaCpp:
    """llama.cpp on a GGUF file, with flash attention and as many threads as torch has.

    Args:
        path: The GGUF file.
        positions: The largest number of tokens that it will hold.
    """

    name = "llama.cpp"

    def __init__(self, path: Path, positions: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self.model = Llama(str(path), n_ctx=positions, n_threads=threads, n_threads_batch=threads, flash_attn=True,
                           verbose=False)  # fmt: skip

    def prefill(self, tokens: Tensor) -> int:
        self.model.reset()
        return self._read(tokens[0].tolist())

    def step(self, token: int) -> int:
        return self._read([token])

    def forget(self) -> None:
        self.model.reset()

    def _read(self, tokens: list[int]) -> int:
        import llama_cpp
        import numpy

        self.model.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)  # of the last token
        return int(numpy.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax())
