"""Threads and forks: concurrent calls, continuations of one state, forks after use, workers of a data loader.

Every result must have the bits of the same call in a quiet process, and nothing may hang.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stress.draws import generator_of
from stress.parts import Failure, Part, draw_for
from subquad import Decoder, Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window, attention

METHODS: dict[str, Any] = {
    "exact": Exact(),
    "taylor": Taylor(2),
    "positive": RandomFeatures(64),
    "elu": Linear("elu"),
    "separable": Separable(),
    "window": Window(20, sinks=2),
    "multipole": Multipole(window=5, sinks=2, block=2, top=2),
}
CALLERS, CHILD_SECONDS = 4, 30.0
Bits = list[bytes]


def draw_tokens(rng: random.Random, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (rng.choice((1, 2)), rng.choice((1, 4)), length, rng.choice((4, 16)))
    return torch.randn(3, *shape, generator=generator_of(rng)).unbind()  # type: ignore[return-value]


def bits(*tensors: Tensor) -> Bits:
    return [x.detach().contiguous().numpy().tobytes() for x in tensors]


def forward(method: Any, tokens: tuple[Tensor, ...]) -> Bits:
    return bits(attention(*tokens, is_causal=True, method=method))


def backward(method: Any, tokens: tuple[Tensor, ...]) -> Bits:
    leaves = [x.clone().requires_grad_() for x in tokens]
    output = attention(*leaves, is_causal=True, method=method)
    return bits(output, *torch.autograd.grad(output.cos().sum(), leaves))


def continued(method: Any, tokens: tuple[Tensor, ...], state: Any) -> Bits:
    """Continue a state that others continue too: with one piece, and token by token."""
    piece, after = attention(*tokens, is_causal=True, method=method, state=state, return_state=True)
    decoder, steps = Decoder(state), []
    for i in range(min(8, tokens[0].shape[-2])):
        steps.append(decoder(*(x[..., i : i + 1, :] for x in tokens)))
    last = attention(*(x[..., :1, :] for x in tokens), is_causal=True, method=method, state=after)
    return bits(piece, last, *steps)


def same(expected: list[Bits], found: Bits, what: str) -> None:
    """Raise Failure unless each result has the bits that one of several quiet calls gave it."""
    wrong = [i for i, own in enumerate(found) if own not in [quiet[i] for quiet in expected]]
    if wrong:
        raise Failure("other bits", f"{what}: results {wrong} differ from those of a quiet process")


def jobs_of(rng: random.Random) -> dict[str, Callable[[], Bits]]:
    """Return calls that may run at the same time; some share inputs, some a state."""
    made: dict[str, Callable[[], Bits]] = {}
    for i in range(CALLERS):
        name = rng.choice(list(METHODS))
        method, length = METHODS[name], rng.choice((1, 40, 200))
        tokens = draw_tokens(rng, length)
        made[f"{i} {name} forward {length}"] = lambda m=method, t=tokens: forward(m, t)
        made[f"{i} {name} backward {length}"] = lambda m=method, t=tokens: backward(m, t)
        _, state = attention(*tokens, is_causal=True, method=method, return_state=True)
        for twin in range(2):
            other = torch.randn(3, *tokens[0].shape[:2], 12, tokens[0].shape[3], generator=generator_of(rng)).unbind()
            made[f"{i} {name} continuation {twin}"] = lambda m=method, t=other, s=state: continued(m, t, s)
    return made


def concurrent(rng: random.Random) -> Counter[str]:
    """Call from several Python threads, while another one changes the number of torch's threads."""
    torch.set_num_threads(1)
    seed = rng.getrandbits(40)
    # The first continuation of a state of Window may write behind its keys, and others copy them. The bits of the call
    # after that depend on where the keys are: each continuation comes first once.
    expected: dict[str, list[Bits]] = {}
    for direction in (1, -1):
        for name, job in [*jobs_of(random.Random(seed)).items()][::direction]:
            expected.setdefault(name, []).append(job())
    jobs = jobs_of(random.Random(seed))  # states that nothing has continued yet
    order = [name for name in jobs for _ in range(3)]
    rng.shuffle(order)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            torch.set_num_threads(rng.choice((1, 2, 3)))
            time.sleep(0.001)

    changer = threading.Thread(target=change, daemon=True)
    if rng.random() < 0.5:
        changer.start()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(CALLERS) as pool:
            found = list(pool.map(lambda name: (name, jobs[name]()), order))
    finally:
        done.set()
        torch.set_num_threads(1)
    for name, result in found:
        if "exact" not in name:  # Torch makes no promise about its own threads.
            same(expected[name], result, f"threads, {name}")
    return Counter({"calls": len(order), "concurrent calls": len(order)})


def forked(rng: random.Random) -> Counter[str]:
    """Fork a process whose kernels used threads; the child computes the same."""
    torch.set_num_threads(2)
    name = rng.choice([name for name in METHODS if name != "exact"])
    tokens = draw_tokens(rng, rng.choice((1, 64, 300)))
    threads = rng.choice((1, 2))
    compute = rng.choice((forward, backward))
    expected = compute(METHODS[name], tokens)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # Torch itself hangs in a child that splits an operation between threads.
            torch.get_num_threads = lambda: threads  # The kernels then start threads of their own.
            found = compute(METHODS[name], tokens)
            os.write(writer, b"same" if found == expected else b"other")
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    answer = _answer(process, reader, f"{name}, {compute.__name__}")
    torch.set_num_threads(1)
    if answer != b"same":
        raise Failure("other bits after a fork", f"{name}, {compute.__name__}, {tuple(tokens[0].shape)}")
    return Counter({"calls": 2, "forks": 1})


def _answer(process: int, reader: int, what: str) -> bytes:
    """Return what a child wrote; raise Failure if it hangs or dies."""
    end = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            answer = os.read(reader, 16)
            os.close(reader)
            if status:
                raise Failure("crash after a fork", f"{what}: status {os.waitstatus_to_exitcode(status)}")
            return answer
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise Failure("hang after a fork", f"{what}: no result after {CHILD_SECONDS:g} s")


class Attended(Dataset[Tensor]):
    """A data set that computes attention for each item."""

    def __init__(self, method: Any, tokens: list[tuple[Tensor, ...]]) -> None:
        self.method, self.tokens = method, tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Tensor:
        return attention(*self.tokens[i], is_causal=True, method=self.method)


def loaded(rng: random.Random) -> Counter[str]:
    """Compute in the forked workers of a data loader, after use of threads in the parent."""
    name = rng.choice([name for name in METHODS if name != "exact"])
    tokens = [draw_tokens(random.Random(1), 50) for _ in range(6)]
    data = Attended(METHODS[name], tokens)
    torch.set_num_threads(2)
    expected = [bits(data[i]) for i in range(len(data))]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=CHILD_SECONDS)
    for i, found in enumerate(loader):
        same([expected[i]], bits(found), f"data loader, {name}")
    torch.set_num_threads(1)
    return Counter({"calls": 2 * len(data), "items of data loaders": len(data)})


KINDS: dict[Callable[[random.Random], Counter[str]], int] = {concurrent: 6, forked: 4, loaded: 1}


def case(number: int, shared: Path) -> Counter[str]:
    """Run one kind of case."""
    rng = draw_for("threads", number)
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng)


PART = Part("threads", "calls", 0.1, 60.0, case)
