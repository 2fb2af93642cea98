"""dist/subquad-*.whl: one wheel, with the kernels, for every Python from 3.11 on and every torch: `make wheel`.

auditwheel reads which symbols of the C library the kernels ask for, and names the wheel after the oldest Linux that has
them; nothing else is linked.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", folder, str(ROOT)], check=True
        )
        (made,) = Path(folder).glob("subquad-*.whl")
        if "-none-any" in made.name:
            sys.exit(f"wheel: {made.name} has no kernels; expected a C++ compiler on this machine")
        tagged = subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(ROOT / "dist"), str(made)]
        )
        return tagged.returncode


if __name__ == "__main__":
    raise SystemExit(main())
