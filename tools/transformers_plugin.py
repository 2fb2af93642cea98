"""pytest plugin of `transformers_suite.py`: transformers' own tests with larger logits and another attention.

    logit = (SCALE q).(SCALE k)

A new model of the tests has parameters so small that attention is a plain average of the values, whatever the mask and
the logits. Its query and key projections are multiplied by SCALE as they are initialized; those that a checkpoint
provides are not.

Each model that a test creates or loads with transformers' default attention then gets a method of Subquad by
`replace_attention`; a model for which the test requests "eager" or another attention keeps it. Two environment
variables are read:

    SUBQUAD_SUITE_METHOD     "exact", "multipole", another method name, or empty for the default attention
    SUBQUAD_SUITE_RESULTS    the file to which one line of JSON is appended for each test
"""

import functools
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad import Multipole
from subquad.integrations.transformers import replace_attention
from subquad.integrations.transformers.layers import layers_of

SCALE = 30
EXACT_WINDOW = 4096  # keys; longer than every input of the tests, so that Multipole approximates nothing
METHODS = {"multipole": Multipole(window=EXACT_WINDOW)}
REPLACED = ("sdpa", "subquad")  # a config that another model has used says "subquad"
LIMIT_SECONDS = 300  # for one test
WHOLE = ("q_proj", "k_proj", "query", "key", "q", "k", "q_attn")  # names of query and key projections
FUSED = "c_attn"  # of GPT-2: queries, keys and values; keys and values in cross-attention


class Suite:
    """State of a run: how deep inside the construction of a model it is, and what the tests did."""

    def __init__(self) -> None:
        self.depth = self.replaced = 0
        self.method: Any = METHODS.get(name := os.environ["SUBQUAD_SUITE_METHOD"], name)
        self.results = Path(os.environ["SUBQUAD_SUITE_RESULTS"])
        self.outcomes: dict[str, tuple[str, str]] = {}

    def finished(self, model: PreTrainedModel) -> None:
        """Replace the attention of a model that is complete."""
        if self.method and model.config._attn_implementation in REPLACED and layers_of(model):
            replace_attention(model, self.method)
            self.replaced += 1


def projections_of(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each module that computes queries or keys, and how many of its first outputs they are; 0 for all."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and last in (*WHOLE, FUSED):
            yield module, 0 if last in WHOLE else weight.shape[1] - weight.shape[0]


def scale_projections(initialize: Any) -> Any:
    """Wrap `initialize_weights`: multiply the query and key projections that it initializes by SCALE."""

    @functools.wraps(initialize)
    def wrapped(model: PreTrainedModel) -> None:
        def is_ready(x: Any) -> bool:
            return getattr(x, "_is_hf_initialized", False)

        fresh = [pair for pair in projections_of(model) if not is_ready(pair[0]) and not is_ready(pair[0].weight)]
        initialize(model)
        with torch.no_grad():
            for module, columns in fresh:
                assert isinstance(module.weight, Tensor)
                (module.weight[:, :columns] if columns else module.weight).mul_(SCALE)

    return wrapped


def finish_construction(suite: Suite, create: Any) -> Any:
    """Wrap `__init__` or `from_pretrained`: replace the attention of the outermost model once it is complete."""

    @functools.wraps(create)
    def wrapped(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        suite.depth += 1
        try:
            result = create(owner, *arguments, **keywords)
        finally:
            suite.depth -= 1
        if not suite.depth:
            made = owner if result is None else result
            suite.finished(made[0] if isinstance(made, tuple) else made)  # with `output_loading_info=True`
        return result

    return wrapped


def install(suite: Suite) -> None:
    """Change `PreTrainedModel` before the modules of the models, which transformers imports when needed."""
    PreTrainedModel.initialize_weights = scale_projections(PreTrainedModel.initialize_weights)
    loading = finish_construction(suite, PreTrainedModel.from_pretrained.__func__)
    PreTrainedModel.from_pretrained = classmethod(loading)
    prepare = PreTrainedModel.__init_subclass__.__func__

    def __init_subclass__(kind: Any, **keywords: Any) -> None:
        prepare(kind, **keywords)
        kind.__init__ = finish_construction(suite, kind.__init__)

    PreTrainedModel.__init_subclass__ = classmethod(__init_subclass__)


suite = Suite()
install(suite)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give each test the same random numbers in every run, and a time limit; record its outcome."""
    suite.replaced = 0
    suite.outcomes[item.nodeid] = ("passed", "")
    random.seed(0)
    torch.manual_seed(0)
    if "tests.test_modeling_common" in sys.modules:  # It has a generator of its own, for inputs.
        sys.modules["tests.test_modeling_common"].global_rng.seed(0)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        outcome, reason = suite.outcomes.pop(item.nodeid)
        line = dict(id=item.nodeid, outcome=outcome, reason=reason, replaced=suite.replaced)
        with suite.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _stop(*_: Any) -> None:
    raise TimeoutError(f"the test took more than {LIMIT_SECONDS} s")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    is_part = isinstance(report, pytest.SubtestReport)
    before, _ = suite.outcomes[report.nodeid]
    if before == "failed" or report.outcome == "passed" or (is_part and report.outcome == "skipped"):
        return
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):  # of a test that was skipped: file, line, reason
        reason = longrepr[2]
    else:
        reason = str(longrepr.reprcrash.message if hasattr(longrepr, "reprcrash") else longrepr)
    suite.outcomes[report.nodeid] = (report.outcome, reason)
