"""Put uPlot, the plotting library of the report, into src/subquad_lab/report/vendor/: python tools/vendor_uplot.py

It needs npm. The report inlines the files, so that it loads nothing; a test compares them with the hashes below. To
update uPlot, change VERSION, run this script, and copy the hashes that it prints.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.6.32"
FOLDER = Path(__file__).parents[1] / "src/subquad_lab/report/vendor"
FILES = {
    "uplot.js": "dist/uPlot.iife.min.js",
    "uplot.css": "dist/uPlot.min.css",
    "uplot.LICENSE": "LICENSE",
}
SHA256 = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def changed() -> dict[str, str]:
    """Return the hashes of the files that are not those of VERSION."""
    found = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in FILES}
    return {name: digest for name, digest in found.items() if digest != SHA256[name]}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", f"uplot@{VERSION}"], cwd=folder, check=True, capture_output=True, text=True
        )
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
            for name, source in FILES.items():
                content = archive.extractfile(f"package/{source}")
                assert content is not None
                (FOLDER / name).write_bytes(content.read())
    for name, digest in changed().items():
        print(f"{name}: {digest}, not the hash in this script")
    return 1 if changed() else 0


if __name__ == "__main__":
    sys.exit(main())
