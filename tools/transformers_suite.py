"""Run transformers' own model tests with the attention of Subquad, and list where they differ from the default.

    python tools/transformers_suite.py CHECKOUT [--models llama bert ...] [--methods exact multipole] [--out FILE]

CHECKOUT is a copy of the transformers repository, whose tests are not part of the package; its version should be that
of the installed one. The tests need pytest, pytest-xdist, parameterized and datasets. They run offline, one process at
a time: the common tests of each model, without those of pretrained weights and of several processes. `exact` and
`multipole` with a window longer than every input compute the same as the default attention, so each test must have the
same outcome. Another method is not exact, and shows that the tests notice: `--methods linear`.

`transformers_plugin.py` describes what is changed: larger logits in all runs, and the attention. DOCUMENTED lists the
differences that docs/transformers.md explains. The exit code is 1 if there are others, and 2 if the tests cannot run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("llama", "gpt2", "bert", "t5", "whisper", "mistral", "qwen2")
METHODS = ("exact", "multipole")
DEFAULT = ""  # the method of the runs with which the others are compared
# Without pretrained weights and without tests that start processes, which would not load the plugin.
SELECTED = "not integration and not slow and not fsdp and not tp_forward and not tp_backward and not tp_generation"
SHOWN_CHARACTERS = 300  # of a failure that is not documented
OUTCOMES = ("passed", "failed", "skipped")


class Cause(NamedTuple):
    """A difference that the documentation explains."""

    reason: str  # in words
    test: str  # a pattern of the test's name
    message: str  # a pattern of the failure


class Result(NamedTuple):
    """The outcome of one test."""

    outcome: str
    message: str
    replaced: int  # models whose attention was replaced


class Change(NamedTuple):
    """A test whose outcome differs from that with the default attention."""

    model: str
    method: str
    test: str
    old: Result
    new: Result
    cause: str  # empty if it is not documented

    @property
    def row(self) -> str:
        """The line of a Markdown table."""
        shown = (
            self.cause or f"**not documented: {(self.new.message or self.old.message).partition(chr(10))[0][:300]}**"
        )
        name = self.test.rpartition("::")[2]
        return f"| {self.model} | {self.method} | {name} | {self.old.outcome} | {self.new.outcome} | {shown} |"


Results = dict[str, Result]  # by the name of the test
Runs = dict[tuple[str, str], Results]  # by model and method
MISSING = Result("missing", "the process ended before this test", 0)
DOCUMENTED = [  # in docs/transformers.md
    Cause("output_attentions", "test_", r"output_attentions \(the attention weights, which are never formed\)"),
    Cause('the name "sdpa"', "test_sdpa_can_dispatch_non_composite_models", "False is not true"),
    Cause("states instead of keys", "test_", r"AssertionError: torch.Size\(\[\d+, \d+, 0, \d+\]\) != "),
    Cause(
        "states are not compiled",
        "test_generate_compile_model_forward_fullgraph|test_static_cache_no_recompile_with_smaller_length",
        "False is not true",
    ),
    Cause(
        "custom masks", "test_custom_4d_attention_mask", r"attention_mask \(a choice for each pair of query and key\)"
    ),
]


def run(checkout: Path, model: str, method: str, file: Path) -> Results:
    """Run the tests of a model in a process, and return their outcomes by name.

    Raises:
        ValueError: There are none, or they do not start.
    """
    tests = Path("tests/models") / model / f"test_modeling_{model}.py"
    if not (checkout / tests).exists():
        raise ValueError(f"{checkout / tests}: no such file; expected --models from the folders of tests/models")
    environment = os.environ | {
        "SUBQUAD_SUITE_METHOD": method,
        "SUBQUAD_SUITE_RESULTS": str(file),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tools"))),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "transformers_plugin", "-k"]
    command += [SELECTED, str(tests)]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if not file.exists():
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        raise ValueError(f"{checkout}: the tests of {model} did not start; see above")
    lines = map(json.loads, file.read_text().splitlines())
    return {x["id"].partition("::")[2]: Result(x["outcome"], x["reason"], x["replaced"]) for x in lines}


def differences(before: Results, now: Results) -> dict[str, tuple[Result, Result]]:
    """Return the tests whose outcome changed."""
    pairs = {name: (before.get(name, MISSING), now.get(name, MISSING)) for name in {**before, **now}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old.outcome != new.outcome}


def cause_of(test: str, message: str) -> str:
    """Return the documented cause of a difference in words; empty if there is none."""
    name = test.rpartition("::")[2]
    return next((x.reason for x in DOCUMENTED if re.match(x.test, name) and re.search(x.message, message)), "")


def counts(results: Results) -> str:
    found = Counter(result.outcome for result in results.values())
    return " / ".join(str(found[outcome]) for outcome in OUTCOMES)


def changes(found: Runs, models: list[str], methods: list[str]) -> list[Change]:
    """Return the tests that have another outcome with one of the methods than with the default attention."""
    return [
        Change(model, method, test, old, new, cause_of(test, new.message))
        for model in models
        for method in methods
        for test, (old, new) in differences(found[model, DEFAULT], found[model, method]).items()
    ]


def report(found: Runs, models: list[str], methods: list[str], versions: str) -> str:
    """Return the outcomes and the differences as Markdown."""
    changed = changes(found, models, methods)
    unexplained = sum(not change.cause for change in changed)
    replaced = sum(x.replaced > 0 for results in found.values() for x in results.values())
    lines = [f"# transformers' own tests\n\n{versions}\n\nPassed / failed / skipped:\n"]
    lines += [f"| model | tests | default | {' | '.join(methods)} |", "|---" * (3 + len(methods)) + "|"]
    for model in models:
        columns = [counts(found[model, method]) for method in (DEFAULT, *methods)]
        lines.append(f"| {model} | {len(found[model, DEFAULT])} | {' | '.join(columns)} |")
    lines.append(
        f"\n{replaced} of these outcomes are those of tests in which the attention of a model was replaced. "
        f"{len(changed)} differ from the default, of which {unexplained} are not documented.\n"
    )
    if changed:
        lines.append("| model | method | test | default | now | cause |\n|---|---|---|---|---|---|")
        lines += sorted(change.row for change in changed)
    return "\n".join(lines) + "\n"


def version_of(checkout: Path) -> str:
    """Return the version of a checkout of transformers.

    Raises:
        ValueError: It is not one.
    """
    file = checkout / "src/transformers/__init__.py"
    found = re.search(r'^__version__ = "(.*)"', file.read_text(), re.MULTILINE) if file.exists() else None
    if found is None or not (checkout / "tests/test_modeling_common.py").exists():
        raise ValueError(f"{checkout}: expected a checkout of the transformers repository, with its tests")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with the transformers repository")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="folders of tests/models (default: seven)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="methods (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the report to this Markdown file")
    options = parser.parse_args()
    found = {}
    try:
        versions = f"transformers {version('transformers')}, tests of {version_of(options.checkout)}"
        with tempfile.TemporaryDirectory() as folder:
            for model in options.models:
                for method in (DEFAULT, *options.methods):
                    results = run(options.checkout, model, method, Path(folder) / f"{model}-{method}.jsonl")
                    print(f"{model}, {method or 'default'}: {counts(results)}", file=sys.stderr, flush=True)
                    found[model, method] = results
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = report(found, options.models, options.methods, versions)
    print(text)
    if options.out:
        options.out.write_text(text)
    return int(any(not change.cause for change in changes(found, options.models, options.methods)))


if __name__ == "__main__":
    sys.exit(main())
