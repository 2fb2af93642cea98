"""Functions that run on several ranks: processes of one program, with gloo between them.

    results = on_ranks(function, 4)    # [function(rank) for each rank], each in its own process

Starting a process takes seconds, so a test module starts its ranks once and lets them do all their checks.
"""

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def on_ranks(function: Callable[[int], Any], count: int, timeout: timedelta = TIMEOUT) -> list[Any]:
    """Return what the function returned on each rank; an exception on any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (function, count, folder, timeout), nprocs=count)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]  # our own files


def _run(rank: int, function: Callable[[int], Any], count: int, folder: str, timeout: timedelta) -> None:
    torch.set_num_threads(1)
    os.environ.pop("OMP_NUM_THREADS", None)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timeout)
    result = function(rank)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Threads of gloo that are still ending can abort the process while Python shuts down.
