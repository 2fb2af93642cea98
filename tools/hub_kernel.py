"""Write the library in the layout of a Hugging Face Hub kernel, which the `kernels` package loads.

    build.toml                      what kernel-builder reads
    torch-ext/subquad/              the sources, with relative imports
    build/torch-cpu/                the same and metadata.json: the variant without compiled code, for any system

The kernel is loaded under a name that depends on its contents, so imports are relative and operators have their own
namespace: an installed subquad and a kernel can be used together. `flash_attn_func` and related functions are at the
top level, where transformers looks for them.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "dist" / "hub-kernel"
EXCLUDED = ("integrations/transformers/", "integrations/lm_eval.py")  # They register names for the whole process.
IMPORT = re.compile(r"^(\s*)from subquad(?:\.([\w.]+))? import ", re.MULTILINE)
FLASH = "from .integrations.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402"
BUILD = """\
[general]
name = "subquad"
version = 1
license = "Apache-2.0"
backends = ["cpu"]

[torch-noarch]
"""


def sources(package: Path, namespace: str) -> dict[str, str]:
    """Return the files of the kernel by their path, with relative imports."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(EXCLUDED):
            dots = "." * (name.count("/") + 1)
            text = IMPORT.sub(lambda m, dots=dots: f"{m[1]}from {dots}{m[2] or ''} import ", path.read_text("utf-8"))
            text = text.replace('"subquad::', f'"{namespace}::').replace(
                "torch.ops.subquad.", f"torch.ops.{namespace}."
            )
            found[name] = f"{text}\n{FLASH}\n" if name == "__init__.py" else text
    return found


def write(target: Path = TARGET, package: Path = ROOT / "src" / "subquad") -> str:
    """Write the layout into an empty folder, and return the id of the kernel."""
    digest = hashlib.sha256("".join(sources(package, "subquad").values()).encode()).hexdigest()
    name = f"subquad_{digest[:8]}"
    shutil.rmtree(target, ignore_errors=True)
    for folder in ("torch-ext/subquad", "build/torch-cpu"):
        for path, text in sources(package, name).items():
            file = target / folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    metadata = {"id": name, "name": "subquad", "version": 1, "license": "Apache-2.0", "python-depends": [],
                "backend": {"type": "cpu"}}  # fmt: skip
    (target / "build/torch-cpu/metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
    (target / "build.toml").write_text(BUILD, "utf-8")
    return name


if __name__ == "__main__":
    print(f"{write()} in {TARGET.relative_to(ROOT)}")
