"""Run the tests of the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

The kernels are recompiled with the sanitizers, whose runtime library must be preloaded. Leak detection is off, because
Python itself leaks.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wno-psabi", "-Wno-ignored-attributes",
         "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]  # fmt: skip
TESTS = ["tests/subquad/test_native.py", "tests/subquad/test_separable.py", "tests/subquad/test_agreement.py",
         "tests/subquad/test_nonfinite.py", "tests/subquad/test_padding.py", "tests/subquad/test_empty.py",
         "tests/subquad/test_multipole.py", "tests/subquad/test_bisection.py", "tests/subquad/test_window.py",
         "tests/subquad/test_block_sparse.py"]  # fmt: skip


def main() -> int:
    compiler = os.environ.get("CXX", "c++")
    # Without the second library, an exception in torch would end the process.
    asked = ([compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so"))
    runtimes = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in asked]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        sources = sorted(map(str, (ROOT / "src/subquad/native").rglob("*.cpp")))
        print("Compiling with the sanitizers ...", flush=True)
        subprocess.run([compiler, *FLAGS, *sources, "-o", str(library)], check=True)
        environment = os.environ | {
            "SUBQUAD_NATIVE": str(library),
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        return subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
