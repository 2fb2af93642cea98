"""Out of memory: one line that says what was being done and what to make smaller, and nothing is lost."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from small_runs import assert_same, resume, start, tiny
from subquad_lab import cli
from subquad_lab.cli import main
from subquad_lab.experiments import language
from subquad_lab.experiments.stored import experiment_of
from subquad_lab.system.out_of_memory import OutOfMemory, is_out_of_memory
from subquad_lab.training import checkpoint, snapshot
from subquad_lab.training.run import Run

ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
                         "you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip
KINDS = (MemoryError(), ALLOCATOR, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def test_errors_about_memory_are_recognized():
    for error in (*KINDS, OSError(12, "Cannot allocate memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error), error
    for call in (lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as found:
            call()
        assert is_out_of_memory(found.value), found.value
    for error in (RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), OSError(28, "no space"),
                  OutOfMemory("out of memory while x")):  # fmt: skip
        assert not is_out_of_memory(error), error


HUNGRY = """
import resource, sys, torch
from subquad_lab.cli import main
from subquad_lab.experiments import language
from subquad_lab.experiments.stored import experiment_of
from pathlib import Path
loss, calls = language.Language.loss, []
def hungry(*given):
    calls.append(1)
    if len(calls) == 6:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.zeros(1 << 28)  # 1 GiB
    return loss(*given)
language.Language.loss = hungry
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_exceeds_a_limit_of_the_system_goes_on_later(text, tmp_path):
    options = dict(data=text, out=tmp_path / "runs", model="rnn", embedding=6, width=8, context=5, batch=4, steps=9,
                   save_every=2, evaluate_every=9)  # fmt: skip
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, "train", "language", *arguments], capture_output=True, text=True
    )
    folder = tmp_path / "runs" / "language-001"
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith(
        f"subquad: error: out of memory while training {folder}, step 6; the last checkpoint is kept"
    )
    assert f"subquad train --resume {folder}" in last and "--batch" in last and "--accumulate" in last
    assert main(["train", "--resume", str(folder)]) == 0
    _, config = experiment_of(Run(folder))
    whole, _ = start(config, tmp_path, "whole")
    assert_same(Run(folder), whole)


@pytest.mark.parametrize("error", KINDS)
def test_an_evaluation_out_of_memory_loses_nothing(error, text, tmp_path, monkeypatch):
    config = tiny(text, steps=2, evaluate_every=1)
    whole, _ = start(config, tmp_path, "whole")

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(language.Language, "evaluate", full)
        with pytest.raises(
            OutOfMemory, match=r"out of memory while evaluating .* on the valid part; the last checkpoint"
        ):
            start(config, tmp_path, "full")
    assert_same(resume(tmp_path / "full")[0], whole)


def test_loading_out_of_memory_is_not_damage(text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise ALLOCATOR

    start(tiny(text, steps=1), tmp_path, "run")
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", full)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        snapshot.load_model(torch.nn.Linear(1, 1), checkpoint.newest(tmp_path / "run" / "checkpoints"))


@pytest.mark.parametrize("command", [command.__name__ for command in cli.COMMANDS])
@pytest.mark.parametrize("error", KINDS)
def test_every_command_says_it_in_one_line(command, error, monkeypatch, capfd):
    def full(*_):
        raise error

    monkeypatch.setattr("subquad_lab.options.parsing.call", full)
    assert main([command]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"subquad: error: out of memory in `subquad {command}`; ")


def test_building_a_model_that_does_not_fit_creates_no_run(text, tmp_path, monkeypatch):
    def full(config):
        raise MemoryError

    experiment = replace(language.EXPERIMENT, build=full)
    with pytest.raises(OutOfMemory, match="out of memory while loading the data and building the model; use a smaller"):
        start(tiny(text), tmp_path, "run", experiment)
    assert not (tmp_path / "run").exists()
