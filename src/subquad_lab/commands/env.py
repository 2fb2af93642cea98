"""`subquad env`: the versions, kernels and settings that a bug report needs.

Nothing is measured or written. The home folder is printed as ~, because reports are public.
"""

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import subquad
from subquad.native import Status, status
from subquad.planning.calibration_file import cached, file_of, machine
from subquad_lab.system.text import say

# Packages that can change a result or an error message; torch and subquad are always listed.
PACKAGES = (
    "numpy", "scipy", "scikit-learn", "safetensors", "transformers", "tokenizers", "accelerate", "gguf", "lm_eval",
    "torch_geometric", "jsonargparse", "optuna", "matplotlib", "onnx", "onnxscript", "onnxruntime",
)  # fmt: skip
VARIABLES = (
    "SUBQUAD_NATIVE", "SUBQUAD_INSTRUCTIONS", "SUBQUAD_CACHE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def run(as_json: bool) -> None:
    """Print the environment as aligned text, or as JSON."""
    found = environment()
    say(*(json.dumps(found, indent=1) if as_json else as_text(found)).split("\n"))


def environment() -> dict[str, Any]:
    """Return everything that is printed, as plain values."""
    kernels = status()
    return {
        "subquad": subquad.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "platform": platform.platform(),
        "processor": str(machine(torch.device("cpu"), torch.float32)["device"]).removeprefix("cpu: "),
        "kernels": {
            "available": kernels.available,
            "instructions": kernels.instructions,
            "reason": _without_home(kernels.reason),
        },
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": {"torch": torch.get_num_threads(), "interop": torch.get_num_interop_threads()},
        "cores": os.cpu_count(),
        "calibration": calibration(),
        "variables": {name: _without_home(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def calibration() -> dict[str, Any]:
    """Return which file holds the calibration for this process, its age, and its state.

    The state is "missing", "invalid" (damaged, or from another version), "rough" (made on a busy machine), or
    "measured".
    """
    device, dtype = torch.device("cpu"), torch.float32
    try:
        file = file_of(machine(device, dtype))
    except RuntimeError:  # no home folder
        return {"state": "missing", "file": None, "age_seconds": None, "note": "no home folder: set SUBQUAD_CACHE"}
    try:
        age = time.time() - file.stat().st_mtime
    except OSError:
        return {"state": "missing", "file": _without_home(str(file)), "age_seconds": None, "note": ""}
    found = cached(device, dtype)
    state = "invalid" if found is None else "rough" if found.note else "measured"
    note = "" if found is None else found.note.strip()
    return {"state": state, "file": _without_home(str(file)), "age_seconds": round(age), "note": note}


def as_text(found: dict[str, Any]) -> str:
    """Return one line for each subject, with the values in one column."""
    kernels, threads = Status(**found["kernels"]), found["threads"]
    rows = {name: found[name] for name in ("subquad", "python", "torch")} | found["packages"]
    rows |= {name: found[name] for name in ("platform", "processor")}
    rows["kernels"] = str(kernels)
    rows["instructions"] = f"{kernels.instructions or 'none'} (kernels), {found['torch_instructions']} (torch)"
    rows["threads"] = f"{threads['torch']} (torch), {threads['interop']} (between operations), {found['cores']} cores"
    rows["calibration"] = _about_calibration(found["calibration"])
    if found["calibration"]["file"] is not None:
        rows["  file"] = found["calibration"]["file"]
    rows |= found["variables"]
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())


def _about_calibration(found: dict[str, Any]) -> str:
    if found["state"] == "missing":
        return f"none ({found['note'] or 'the first plan calibrates this machine in at most 30 s'})"
    age = _age(found["age_seconds"])
    if found["state"] == "invalid":
        return f"invalid, {age} old: the next plan calibrates again"
    return f"rough, {age} old. {found['note']}" if found["state"] == "rough" else f"measured, {age} old"


def _age(seconds: float) -> str:
    """Return an age in its largest whole unit."""
    for unit, length in UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def _without_home(text: str) -> str:
    """Replace the home folder by ~."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return text
    return text.replace(home, "~") if len(home) > 1 else text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
