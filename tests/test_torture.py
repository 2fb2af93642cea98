"""A few cases of each part of `make torture`, and faults that each part must find."""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import reference
from stress import bits, calls, command, faults, files, flips, kills, oracle, threads, workers
from stress.command import Outcome
from stress.hostile import FORMATS
from stress.parts import Failure, Part
from stress.workers import run_case, run_cases
from subquad import attention, native
from subquad.planning import calibration, calibration_file

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="cases run in forked processes"),
]
needs_kernels = pytest.mark.skipif(not native.available(), reason="the native kernels are not available")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Restore what cases change: threads, the cache, the current folder."""
    count = torch.get_num_threads()
    monkeypatch.setenv("SUBQUAD_CACHE", os.environ["SUBQUAD_CACHE"])
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def failures(part: Part, cases: range) -> Counter[str]:
    """Return the failures of cases in this process, by kind."""
    found: Counter[str] = Counter()
    for case in cases:
        try:
            run_case(part, case, Path())
        except Failure as failure:
            found[failure.kind] += 1
    return found


def changed(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention whose output is changed."""

    def faulty(query: Any, key: Any, value: Any, **options: Any) -> Any:
        found = attention(query, key, value, **options)
        if isinstance(found, tuple):
            return change(found[0], value), found[1]
        return change(found, value)

    return faulty


# --- Calls ------------------------------------------------------------------------------------------------------------


def test_calls_are_right_or_refused_by_name():
    assert failures(calls.PART, range(150)) == {}


@pytest.mark.parametrize("name", reference.METHODS)
def test_the_oracle_agrees_with_the_other_one(name):
    if name == "user":
        pytest.skip("a map of its own")
    method, draw = reference.METHODS[name], torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 9, 4, generator=draw, dtype=torch.float64).unbind()
    seen = reference.visible(9, 9, True, None, None).expand(2, 1, 9, 9)
    found = oracle.golden(method, q, k, v, seen, 0.5)
    torch.testing.assert_close(found.output, reference.reference(method, q, k, v, is_causal=True, scale=0.5))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("wrong output", changed(lambda output, value: output + 1e-3)),
        ("wrong shape", changed(lambda output, value: output[..., :0, :])),
        ("internal error", changed(lambda output, value: [][0])),
        ("poison lost", changed(lambda output, value: output.nan_to_num(0))),
        ("wrong gradient", changed(lambda output, value: output.detach() + 0.99 * (output - output.detach()))),
    ],
)
def test_faulty_calls_are_found(kind, fault, monkeypatch):
    monkeypatch.setattr(calls, "attention", fault)
    assert failures(calls.PART, range(40))[kind] > 0


def test_a_wrong_call_that_is_accepted_is_found(monkeypatch):
    def lenient(query: Any, key: Any, value: Any, **options: Any) -> Any:
        try:
            return attention(query, key, value, **options)
        except (ValueError, TypeError):
            return query

    monkeypatch.setattr(calls, "attention", lenient)
    assert failures(calls.PART, range(40))["wrong call accepted"] > 0


# --- Bits -------------------------------------------------------------------------------------------------------------


def test_bits_stay():
    assert failures(bits.PART, range(6)) == {}


def leaking(output: Any, value: Any) -> Any:
    return output + 1e-6 * value.nan_to_num(0, 0, 0).sum(-2, keepdim=True).sum(-1, keepdim=True).sum(-3, keepdim=True)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("the future changes the past", leaking),
        ("other rows change bits", lambda output, value: output * (1 + 1e-6 * len(output))),
        ("threads change bits", lambda output, value: output * (1 + 1e-6 * torch.get_num_threads())),
    ],
)
def test_changed_bits_are_found(kind, change, monkeypatch):
    monkeypatch.setattr(bits, "attention", changed(change))
    assert failures(bits.PART, range(4))[kind] > 0


# --- Kills and flips --------------------------------------------------------------------------------------------------


def test_a_killed_run_ends_as_an_undisturbed_one_and_differences_are_found(tmp_path, monkeypatch):
    shared, place = tmp_path / "shared", tmp_path / "place"
    shared.mkdir()
    place.mkdir()
    monkeypatch.setattr(kills, "STEPS", 12)
    monkeypatch.setattr(kills, "MAX_KILLS", 3)
    monkeypatch.setattr(kills, "MAX_DELAY", 0.2)  # early, though other tests make the duration uncertain
    kills.prepare(shared, ["rnn"])
    counts = kills.killed(random.Random(0), "rnn", place, shared)
    assert counts["kills"] > 0
    kills.compare("rnn", place, shared / "whole/rnn")
    log = place / "run/metrics.jsonl"
    log.write_bytes(log.read_bytes() + b"\n")
    with pytest.raises(Failure, match="another end"):
        kills.compare("rnn", place, shared / "whole/rnn")
    steps = kills.check_saved(shared / "whole/rnn", {})
    with pytest.raises(Failure, match="progress lost"):
        kills.check_saved(shared / "whole/rnn", {name: step + 1 for name, step in steps.items()})


def flipped(name: str, shared: Path, tmp_path: Path, count: int, only: str = "") -> Counter[str]:
    """Return what became of damaged copies: counts, and failures by kind."""
    found: Counter[str] = Counter()
    for seed in range(count):
        place = tmp_path / f"{name}-{seed}"
        place.mkdir()
        try:
            found.update(flips.flip(random.Random(seed), name, shared, place))
        except Failure as failure:
            found[f"FAILED {failure.kind}"] += only in failure.detail
    return +found


def test_flips_are_noticed_or_harmless_and_a_reader_without_checksums_is_found(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for module, name in ((os, "getloadavg"), (calibration, "measured_seconds")):  # restored after the test
        monkeypatch.setattr(module, name, getattr(module, name))
    flips.prepare(shared, ["calibration", "speech", "finished"])
    has_sums = find_spec("subquad_lab.system.checksums") is not None
    for name, count in (("calibration", 40), ("speech", 20), ("finished", 8)):
        found = flipped(name, shared, tmp_path, count, "" if has_sums else "checkpoints/")
        assert found["flips and cuts"] > count / 2
        assert not [kind for kind in found if kind.startswith("FAILED")], (name, found)
    monkeypatch.setattr(calibration_file, "checksum_of", lambda content: ANY)
    again = tmp_path / "again"
    again.mkdir()
    assert flipped("calibration", shared, again, 40)["FAILED used in silence"] > 0


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [files._config, files._pictures, files._sample])
def test_hostile_files_are_refused(reader, tmp_path):
    for seed in range(6):
        place = tmp_path / str(seed)
        place.mkdir()
        os.chdir(place)
        path, arguments = reader(random.Random(seed), place, tmp_path)
        formats, _ = files.READERS[reader]
        path.write_bytes(FORMATS[formats[0]][seed](random.Random(seed)))
        assert files.check(arguments, f"{formats[0]} {seed}", place)["refused"] == 1


@pytest.mark.parametrize(
    ("kind", "code", "err", "touches"),
    [
        ("executed", 2, "subquad: error: x", True),
        ("exit code 1", 1, "subquad: error: x", False),
        ("not one line", 2, "usage: ...\nsubquad: error: x\nmore", False),
    ],
)
def test_harm_by_files_is_found(kind, code, err, touches, tmp_path, monkeypatch):
    def run(*_: object) -> Outcome:
        if touches:
            (tmp_path / files.CANARY).touch()
        return Outcome(code, "", err)

    monkeypatch.setattr(files, "run_command", run)
    with pytest.raises(Failure, match=kind):
        files.check(("runs",), "x", tmp_path)


def test_a_traceback_of_a_command_is_found(monkeypatch):
    monkeypatch.setattr(command, "main", lambda arguments: {}["x"])
    with pytest.raises(Failure, match="traceback: KeyError"):
        command.run_command("runs")


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_threads_and_forks_change_nothing():
    for kind in (threads.concurrent, threads.forked, threads.loaded):
        kind(random.Random(1))


def test_noise_of_threads_is_found(monkeypatch):
    draws = iter(range(10**9))
    monkeypatch.setattr(threads, "attention", changed(lambda output, value: output + 1e-6 * next(draws)))
    with pytest.raises(Failure, match="other bits"):
        threads.concurrent(random.Random(1))


def test_a_child_that_hangs_is_found(monkeypatch):
    parent, forward = os.getpid(), threads.forward
    monkeypatch.setattr(threads, "CHILD_SECONDS", 0.3)
    slow = lambda *given: time.sleep(60) if os.getpid() != parent else forward(*given)
    monkeypatch.setattr(threads, "forward", slow)
    monkeypatch.setattr(threads, "backward", slow)
    with pytest.raises(Failure, match="hang after a fork"):
        threads.forked(random.Random(1))


# --- Ranks at fault ---------------------------------------------------------------------------------------------------

ONE_OF_EACH_FAULT = (1, 2, 7, 8)


def test_every_rank_reports_the_fault_of_one():
    found = Counter[str]()
    for number in ONE_OF_EACH_FAULT:
        found += faults.case(number, Path())
    assert found == dict.fromkeys(faults.FAULTS, 1) | {"faults": 4}


def test_ranks_that_notice_nothing_are_found(monkeypatch):
    monkeypatch.setattr(faults, "attention", attention)  # which exchanges nothing
    with pytest.raises(Failure, match="rank without an error"):
        faults.case(ONE_OF_EACH_FAULT[0], Path())


def test_ranks_that_hang_are_found(monkeypatch):
    monkeypatch.setattr(faults, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(faults, "attention", lambda *given, **options: time.sleep(60))
    with pytest.raises(Failure, match=r"hang of a rank: .* 3 ranks run after 0.5 s"):
        faults.case(ONE_OF_EACH_FAULT[0], Path())


# --- The processes that run cases -------------------------------------------------------------------------------------


def _troubled(case: int, shared: Path) -> Counter[str]:
    if case == 1:
        time.sleep(60)
    if case == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == 3:
        raise Failure("wrong", "found 2, expected 1")
    if case == 4:
        raise KeyError("x")
    if case == 5:
        os._exit(7)
    return Counter({"things": 1 + len(list(shared.iterdir()))})


def test_hangs_crashes_and_errors_are_recorded_and_the_next_case_runs(tmp_path):
    part = Part("troubled", "things", 1.0, 1.0, _troubled, lambda shared: (shared / "file").touch())
    tally = run_cases(part, range(8), 60.0, tmp_path / "files", jobs=2)
    kinds = {found.case: found.kind for found in tally.failures}
    assert kinds == {1: "hang", 2: "crash, SIGSEGV", 3: "wrong", 4: "KeyError", 5: "crash, exit code 7"}
    assert tally.counts == {"things": 6} and tally.cases == 8
    details = {found.case: found.detail for found in tally.failures}
    assert "_troubled" in details[1] and "_troubled" in details[2] and "test_torture.py" in details[4]


def test_an_interruption_leaves_no_process(tmp_path, monkeypatch):
    started, start = [], workers._start
    monkeypatch.setattr(workers, "_start", lambda *given: started.append(start(*given)) or started[-1])

    def interrupt(tally: Any) -> None:
        raise KeyboardInterrupt

    part = Part("waiting", "things", 1.0, 60.0, lambda case, shared: time.sleep(60))
    with pytest.raises(KeyboardInterrupt):
        run_cases(part, range(2), 60.0, tmp_path / "files", report=interrupt)
    for worker in started:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.process, 0)
    assert started


def test_a_preparation_that_fails_is_a_failure(tmp_path):
    part = Part("broken", "things", 1.0, 1.0, _troubled, lambda shared: 1 / 0)
    (found,) = run_cases(part, range(3), 1.0, tmp_path / "files").failures
    assert found.kind == "ZeroDivisionError"


def test_the_table_and_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import torture

    part = Part("troubled", "things", 1.0, 1.0, _troubled)
    monkeypatch.setattr(torture, "PARTS", {"troubled": part})
    monkeypatch.setattr(torture, "CASES_PER_SEED", 4)
    monkeypatch.setattr(torture, "PRELOADED", ())
    monkeypatch.setattr(sys, "argv", ["torture", "--minutes", "0.1", "--seed", "0", "--out", str(tmp_path / "x.md")])
    assert torture.main() == 1
    page = (tmp_path / "x.md").read_text()
    assert "| troubled | 1 things | 4 |" in page and "hang: 1" in page
    assert "python tools/torture.py --only troubled --case 1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["torture", "--only", "troubled", "--case", "3"])
    assert torture.main() == 1
    assert "found 2, expected 1" in capsys.readouterr().out
