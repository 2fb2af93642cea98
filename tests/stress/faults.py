"""Faults of one rank: it ends, or calls attention with other shapes, another dtype or another method.

Every other rank must end with an error within the time limit, and none may hang. The ranks are forked processes with
gloo between them.
"""

import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stress.draws import generator_of
from stress.parts import Failure, Part, draw_for
from subquad import Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window
from subquad.distributed import ExchangeError, attention

RANKS, GROUP_SECONDS, LIMIT_SECONDS = 3, 10, 30.0
METHODS: tuple[Any, ...] = (
    Exact(), Taylor(2), RandomFeatures(32), Linear("elu"), Separable(), Window(20), Multipole(window=5, block=2, top=2),
)  # fmt: skip
FAULTS = ("ends", "other shapes", "another dtype", "another method")
NO_ERROR, ENDED, REPORTED = 0, 3, 4


def make_calls(rng: random.Random, rank: int, fault: str, faulty: int) -> None:
    """Make one call as all ranks do, then one in which a rank is at fault."""
    method, length, trains = rng.choice(METHODS), rng.choice((1, 40, 700)), rng.random() < 0.5
    shape = [1, 2, length, 8]
    others = [x for x in METHODS if x != method]
    another = rng.choice(others)
    tokens = torch.randn(3, *shape, generator=generator_of(rng)).requires_grad_(trains)
    attend(tokens, method)
    if rank == faulty:
        if fault == "ends":
            os._exit(ENDED)
        if fault == "other shapes":
            tokens = torch.randn(3, 1, 2, length, 4).requires_grad_(trains)
        elif fault == "another dtype":
            tokens = tokens.detach().double().requires_grad_(trains)
        else:
            method = another
    attend(tokens, method)


def attend(tokens: torch.Tensor, method: Any) -> None:
    output = attention(*tokens.unbind(), is_causal=True, method=method)
    if output.requires_grad:
        output.sum().backward()


def run_rank(seed: str, rank: int, fault: str, faulty: int, folder: Path) -> int:
    """Return the exit code of one rank."""
    store, timeout = f"file://{folder}/store-{os.getppid()}-{seed}", timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    try:
        make_calls(random.Random(seed), rank, fault, faulty)
    except (ValueError, ExchangeError):
        return REPORTED
    return NO_ERROR


def case(number: int, shared: Path) -> Counter[str]:
    """Let one of three ranks be at fault."""
    rng = draw_for("faults", number)
    fault, faulty = rng.choice(FAULTS), rng.randrange(RANKS)
    begin, codes = time.monotonic(), dict[int, int]()
    processes = {start_rank(f"{number}", rank, fault, faulty, Path.cwd()): rank for rank in range(RANKS)}
    while processes and time.monotonic() < begin + LIMIT_SECONDS:
        for process in list(processes):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[processes.pop(process)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    what = f"rank {faulty} of {RANKS} {fault}"
    if processes:
        raise Failure("hang of a rank", f"{what}: {len(processes)} ranks run after {LIMIT_SECONDS:g} s")
    expected = {rank: ENDED if fault == "ends" and rank == faulty else REPORTED for rank in range(RANKS)}
    if codes != expected:
        raise Failure("rank without an error", f"{what}: expected exit codes {expected}, got {codes}")
    return Counter({"faults": 1, fault: 1})


def start_rank(seed: str, rank: int, fault: str, faulty: int, folder: Path) -> int:
    """Fork a rank and return its process."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = run_rank(seed, rank, fault, faulty, folder)
        finally:
            os._exit(code)
    return process


PART = Part("faults", "faults", 0.05, 2 * LIMIT_SECONDS, case)
