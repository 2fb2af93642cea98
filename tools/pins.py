"""Which pinned packages each documented installation needs, on every supported system.

    group    requirements
    library  `dependencies` of pyproject.toml
    extra    that extra of pyproject.toml, and the groups that it names as `subquad[other]`
    cuda     what torch's own wheels for Linux need in addition; its CPU builds and macOS do not
    weights  the remaining pins: packages of which benchmarks read only the data, installed with --no-deps

A group is the union over Linux and macOS and the supported Python versions, so one list serves all of them. Versions
are those of constraints.txt: nothing is resolved, but a requirement that a pin does not meet is an error.
"""

import re
import tomllib
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SYSTEMS = [("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Darwin", "darwin", "arm64")]
Environment = dict[str, str]


def read_pins(text: str) -> dict[str, str]:
    """Return the version of each package in a constraints file, by normalized name.

    Example:
        >>> read_pins("# comment\\nPyYAML==6.0.3\\nruamel.yaml==0.19.1\\n")
        {'pyyaml': '6.0.3', 'ruamel-yaml': '0.19.1'}
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if pair is None:
            raise SystemExit(f"constraints.txt: expected name==version, not {line!r}")
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair is not None}


def declared() -> dict[str, list[Requirement]]:
    """Return the requirements of the library and of each extra of pyproject.toml."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = {"library": table["dependencies"], **table["optional-dependencies"]}
    return {group: [Requirement(text) for text in own] for group, own in texts.items()}


def included(own: list[Requirement]) -> list[str]:
    """Return the extras that a group builds on, which it names as `subquad[other]`."""
    return sorted(extra for requirement in own if requirement.name == "subquad" for extra in requirement.extras)


def supported_pythons() -> list[str]:
    """Return the Python versions that pyproject.toml names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)]


def environments() -> list[Environment]:
    """Return the markers of each supported system and Python."""
    return [
        {"platform_system": system, "sys_platform": short, "platform_machine": machine, "os_name": "posix",
         "python_version": version, "python_full_version": f"{version}.0", "implementation_name": "cpython",
         "platform_python_implementation": "CPython"}
        for (system, short, machine), version in product(SYSTEMS, supported_pythons())
    ]  # fmt: skip


def needed(
    requirements: Iterable[Requirement],
    environment: Environment,
    pins: dict[str, str],
    requires: Callable[[str], list[Requirement]],
) -> set[str]:
    """Return the names of all packages that requirements need, directly or not.

    Args:
        requirements: What is installed.
        environment: Values of the markers.
        pins: The version of each package.
        requires: Returns what a package requires, by its name.

    Raises:
        SystemExit: If a package is not pinned, or its pin does not meet a requirement.
    """
    waiting = [(requirement, "", "pyproject.toml") for requirement in requirements if requirement.name != "subquad"]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra, whose = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in pins:
            where = f"{environment['platform_system']}, Python {environment['python_version']}"
            raise SystemExit(f"constraints.txt: {whose} needs {requirement} on {where}; add a pin for {name}")
        if not requirement.specifier.contains(pins[name], prereleases=True):
            raise SystemExit(f"constraints.txt: {whose} needs {requirement}, which {name}=={pins[name]} does not meet")
        new = {(name, part) for part in ("", *requirement.extras)} - seen
        seen |= new
        waiting += [(next_, part, f"{name} {pins[name]}") for _, part in new for next_ in requires(name)]
    return {name for name, _ in seen}


def groups(pins: dict[str, str], requires: Callable[[str], list[Requirement]]) -> dict[str, set[str]]:
    """Return the packages of each group; those of the groups that it builds on are included."""
    lists, systems = declared(), environments()
    library = lists["library"]
    of_macos = [needed(library, each, pins, requires) for each in systems if each["sys_platform"] == "darwin"]
    cuda = set[str]().union(*(needed(library, each, pins, requires) for each in systems)) - set[str]().union(*of_macos)
    found: dict[str, set[str]] = {}
    for group, own in lists.items():  # pyproject.toml lists a group after those it builds on
        direct = [needed([*library, *own], each, pins, requires) for each in systems]
        found[group] = set[str]().union(*direct, *(found[other] for other in included(own))) - cuda
    rest = pins.keys() - cuda - set[str]().union(*found.values())
    return {**found, "cuda": cuda, "weights": rest}


def added(group: str, packages: dict[str, set[str]]) -> set[str]:
    """Return the packages of a group that none of the groups it builds on has."""
    return packages[group] - set[str]().union(*(packages[other] for other in bases(group)))


def bases(group: str) -> list[str]:
    """Return the groups that a group builds on.

    Example:
        >>> bases("speech"), bases("lab"), bases("cuda")
        (['lab'], ['library'], [])
    """
    own = declared().get(group, [])
    return [] if group in ("library", "cuda", "weights") else included(own) or ["library"]
