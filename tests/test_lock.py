"""requirements/ and docs/licenses.md agree with constraints.txt and pyproject.toml; each check has a planted fault."""

import base64
import doctest
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import licenses  # noqa: E402
import lock  # noqa: E402
import package_index  # noqa: E402
import pins  # noqa: E402

PINS = pins.read_pins((ROOT / "constraints.txt").read_text())
PAGE = (ROOT / "docs/licenses.md").read_text()
MACOS = {**pins.environments()[-1]}


def locked(file: Path) -> dict[str, tuple[str, set[str]]]:
    """Return version and hashes of each package in a requirements file and those that it includes."""
    text = file.read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.startswith("-r "):
            found |= locked(file.parent / line.removeprefix("-r "))
        elif not line.startswith(("#", "--")):
            name, *hashes = line.split()
            found[name.partition("==")[0]] = (name.partition("==")[2], set(hashes))
    return found


def faults(folder: Path) -> list[str]:
    """Return where the lists differ from the pins and from what pyproject.toml requires."""
    lists = {file.stem: locked(file) for file in folder.glob("*.txt")}
    found = [f"{name}: in no list" for name in PINS.keys() - {name for own in lists.values() for name in own}]
    for group, own in lists.items():
        for name, (version, hashes) in own.items():
            if PINS.get(name) != version:
                found.append(f"{group}: {name}=={version}, pinned {PINS.get(name)}")
            if not hashes or not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes):
                found.append(f"{group}: {name} without hashes")
    for group, requirements in pins.declared().items():
        own = lists.get(group, {}) | lists.get("cpu", {})
        missing = {canonicalize_name(each.name) for each in requirements} - own.keys() - {"subquad"}
        found += [f"{group}: {name} is missing" for name in missing]
    return sorted(found)


def test_every_pin_has_hashes_and_every_extra_a_list():
    assert faults(ROOT / "requirements") == [], "run: make lock"


@pytest.mark.parametrize(
    ("file", "pattern", "new", "message"),
    [
        ("lab", r"^rich==.*", r"rich==1.0 \\", f"lab: rich==1.0, pinned {PINS['rich']}"),
        ("speech", r" \\\n    --hash=.*", "", "speech: espeakng-loader without hashes"),
        ("cpu", r"(?<=--hash=sha256:)..", "xx", "cpu: torch without hashes"),
        ("weights", r"^gensim==.*(\n    .*)*\n", "", "gensim: in no list"),
        ("transformers", r"^transformers==.*(\n    .*)*\n", "", "transformers: transformers is missing"),
        ("dev", r"\Z", "planted==1 --hash=sha256:" + 64 * "0" + "\n", "dev: planted==1, pinned None"),
    ],
)
def test_a_fault_in_a_list_is_reported(tmp_path, file, pattern, new, message):
    folder = shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    text = (folder / f"{file}.txt").read_text()
    (folder / f"{file}.txt").write_text(re.sub(pattern, new, text, flags=re.MULTILINE))
    assert message in faults(folder)


def test_torch_is_a_cpu_build_or_comes_with_its_gpu_packages():
    cpu, cuda = locked(ROOT / "requirements/cpu.txt"), locked(ROOT / "requirements/cuda.txt")
    assert not cpu["torch"][1] & cuda["torch"][1]
    assert "triton" in cuda.keys() - cpu.keys()
    assert all(cuda[name] == cpu[name] for name in cpu.keys() - {"torch"})


def rows(page: str) -> dict[str, str]:
    """Return the versions in the table of all packages."""
    return dict(re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \| [^|]+ \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE))


def test_the_page_has_the_license_of_every_pin():
    assert rows(PAGE) == PINS, "run: make lock"


@pytest.mark.parametrize(("old", "new"), [("| rich | ", "| rich | 0."), ("| rich | ", "| poor | "), ("MIT", "")])
def test_a_fault_in_the_page_is_reported(old, new):
    (line,) = re.findall(r"^\| rich \| \d.*$", PAGE, flags=re.MULTILINE)
    assert rows(PAGE.replace(line, line.replace(old, new))) != PINS


def test_the_license_of_espeak_and_its_process_are_stated_where_it_is_offered():
    places = ["docs/licenses.md", "docs/experiments/speech.md", "pyproject.toml", "src/subquad_lab/cli.py"]
    for place in places:
        text = " ".join((ROOT / place).read_text().replace("#", " ").split())
        assert re.search(r"espeak-ng[^.]*GPL-3\.0-or-later", text), place
        assert "separate process" in text, place


def make_wheel(folder: Path, name: str, requires: str = "") -> Path:
    """Write a wheel that contains one empty module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for file, text in files.items()}
    record = "".join(f"{file},sha256={digest.decode().rstrip('=')},\n" for file, digest in digests.items())
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(file, text)
    return path


def test_pip_installs_what_is_listed_and_refuses_a_file_that_was_changed(tmp_path):
    first, second = make_wheel(tmp_path, "first", "Requires-Dist: second"), make_wheel(tmp_path, "second")
    index = package_index.PackageIndex(None, [], [str(tmp_path)])
    wheels = {name: index.wheels(name, "1.0") for name in ("first", "second")}
    assert index.metadata(wheels["first"])["Requires-Dist"] == "second"
    (tmp_path / "planted.txt").write_text(lock.listing("planted", [], wheels, dict.fromkeys(wheels, "1.0")))
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--find-links", str(tmp_path),
               "--require-hashes", "-r", str(tmp_path / "planted.txt"), "--target"]  # fmt: skip
    done = subprocess.run([*command, str(tmp_path / "good")], capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "good/second.py").exists(), done.stderr
    second.write_bytes(second.read_bytes() + b"\0")
    done = subprocess.run([*command, str(tmp_path / "bad")], capture_output=True, text=True)
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr and first.exists()


class FakeSession:
    """Answers as an index does: pages by address, and parts of a file."""

    def __init__(self, page: str, content: bytes):
        self.page, self.content = page, content

    def head(self, url, headers):
        size = {"Content-Length": str(len(self.content))}
        return SimpleNamespace(headers=size, raise_for_status=lambda: None)

    def get(self, url, headers=None):
        found = SimpleNamespace(url=url, status_code=200, text=self.page, raise_for_status=lambda: None)
        if headers is not None:
            start, end = map(int, headers["Range"].removeprefix("bytes=").split("-"))
            found.status_code, found.content = 206, self.content[start : end + 1]
        elif not url.endswith("/first/"):
            found.status_code = 404
        return found


def test_hashes_and_metadata_come_from_the_index(tmp_path):
    wheel = make_wheel(tmp_path, "first", "License: MIT")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    names = ["first-1.0-py3-none-any.whl", "first-1.0.tar.gz", "first-2.0-py3-none-any.whl",
             "first-1.0-38-none-any.whl", "first-1.0-cp311-cp311-win_amd64.whl",
             "first-1.0-cp310-cp310-manylinux_2_28_x86_64.whl"]  # fmt: skip
    page = "".join(f'<a href="../../files/{name}#sha256={digest}">{name}</a>' for name in names)
    index = package_index.PackageIndex(FakeSession(page, wheel.read_bytes()), ["https://index.test/simple"], [])
    (found,) = index.wheels("First", "1.0")
    assert (found.url, found.sha256) == (f"https://index.test/files/{names[0]}", digest)
    assert licenses.license_of("first", index.metadata([found])) == "MIT"
    with pytest.raises(SystemExit, match=r"second==1\.0: no index of pip's configuration has a wheel"):
        index.wheels("second", "1.0")
    index.session.page = page.replace("sha256", "md5")
    with pytest.raises(SystemExit, match=r"first-1\.0-py3-none-any\.whl: its index gives no SHA-256"):
        index.wheels("first", "1.0")


def test_requirements_are_followed_with_markers_and_extras():
    requires = {
        "a": ["b[x]>=1", "c; sys_platform == 'linux'"],
        "b": ["d; extra == 'x'", "e; extra == 'y'"],
        "d": ["a"],
    }

    def follow(versions: dict[str, str]) -> set[str]:
        def own(name: str) -> list[Requirement]:
            return [Requirement(text) for text in requires.get(name, [])]

        return pins.needed([Requirement("a")], MACOS, versions, own)

    assert follow(dict.fromkeys("abd", "1")) == {"a", "b", "d"}
    with pytest.raises(SystemExit, match=r"b 1 needs d.* on Darwin, Python 3.*add a pin for d"):
        follow(dict.fromkeys("ab", "1"))
    with pytest.raises(SystemExit, match=r"a 1 needs b\[x\]>=1, which b==0\.9 does not meet"):
        follow({**dict.fromkeys("ad", "1"), "b": "0.9"})


@pytest.mark.parametrize("module", [licenses, package_index, pins], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0
