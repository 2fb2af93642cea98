"""What the package index offers for a pinned version: the SHA-256 of every wheel, and the metadata of one of them.

The pages are read by pip's own session, so that pip's configuration (indexes, find-links, certificates, logins)
applies. pip has no public interface for this. The functions used here are the same in pip 23.2 and 26.3.
"""

import email
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pins import supported_pythons
from pip._internal.commands import create_command

PLAIN = {"Accept-Encoding": "identity"}  # the bytes as they are, not compressed
FIRST_PYTHON = min(int(version.removeprefix("3.")) for version in supported_pythons())


@dataclass(frozen=True)
class Wheel:
    """A file on an index."""

    filename: str
    url: str
    sha256: str


class Links(HTMLParser):
    """The targets of all links on a page."""

    def __init__(self, page: str):
        super().__init__()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


class RemoteFile(io.BytesIO):
    """A file on a server, of which only the parts that are read are downloaded (HTTP range requests)."""

    def __init__(self, session: Any, url: str):
        super().__init__()
        self.session, self.url, self.position = session, url, 0
        answer = session.head(url, headers=PLAIN)
        answer.raise_for_status()
        self.size = int(answer.headers["Content-Length"])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self.position + size, self.size)
        if end <= self.position:
            return b""
        answer = self.session.get(self.url, headers=PLAIN | {"Range": f"bytes={self.position}-{end - 1}"})
        if answer.status_code != 206:
            raise SystemExit(f"{self.url}: expected a part of the file (HTTP status 206), not {answer.status_code}")
        self.position = end
        return bytes(answer.content)


class PackageIndex:
    """The indexes and folders that pip is configured to use."""

    def __init__(self, session: Any, indexes: list[str], folders: list[str]):
        self.session, self.indexes, self.folders = session, indexes, folders

    def wheels(self, name: str, version: str) -> list[Wheel]:
        """Return the wheels of a version for Linux and macOS, those of `version+cpu` and the like included.

        Raises:
            SystemExit: If there is none, or an index does not state the SHA-256 of one.
        """
        found = [wheel for url in self._links(name) if (wheel := self._wheel(url, name, version)) is not None]
        if not found:
            raise SystemExit(f"{name}=={version}: no index of pip's configuration has a wheel for Linux or macOS")
        return sorted(set(found), key=lambda wheel: (wheel.filename, wheel.url))

    def metadata(self, wheels: list[Wheel]) -> Message:
        """Return the metadata of a version from one of its wheels: not `+cpu` or the like if there is another."""
        first = min(
            wheels, key=lambda wheel: ("+" in wheel.filename, "manylinux" not in wheel.filename, wheel.filename)
        )
        with zipfile.ZipFile(local_path(first.url) or RemoteFile(self.session, first.url)) as archive:
            (member,) = (member for member in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", member))
            return email.message_from_bytes(archive.read(member))

    def _links(self, name: str) -> Iterator[str]:
        for index in self.indexes:
            page = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
            yield from self._links_of(page + "index.html" if page.startswith("file:") else page)
        for folder in self.folders:
            path = local_path(folder) or Path(folder)
            if path.is_dir():
                yield from (file.resolve().as_uri() for file in path.glob("*.whl"))
            else:
                yield from self._links_of(folder)

    def _links_of(self, page: str) -> list[str]:
        answer = self.session.get(page)
        if answer.status_code == 404:
            return []
        answer.raise_for_status()
        return [urljoin(answer.url, target) for target in Links(answer.text).targets]

    def _wheel(self, link: str, name: str, version: str) -> Wheel | None:
        url, fragment = urldefrag(link)
        filename = urlsplit(url).path.rpartition("/")[2].replace("%2B", "+").replace("%2b", "+")
        if not fits(filename, name, version):
            return None
        path = local_path(url)
        if path is not None:
            return Wheel(filename, url, hashlib.sha256(path.read_bytes()).hexdigest())
        if not re.fullmatch(r"sha256=[0-9a-f]{64}", fragment):
            raise SystemExit(f"{filename}: its index gives no SHA-256; use an index that does")
        return Wheel(filename, url, fragment.removeprefix("sha256="))


def local_path(url: str) -> Path | None:
    """Return the path of a file: URL, or None for any other."""
    return Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None


def fits(filename: str, name: str, version: str) -> bool:
    """Return whether a file is a wheel of this version that a supported Python on Linux or macOS could install.

    Example:
        >>> fits("rich-15.0.0-py3-none-any.whl", "Rich", "15.0.0")
        True
        >>> fits("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch", "2.13.0")
        True
        >>> fits("numpy-2.4.6-cp312-cp312-win_amd64.whl", "numpy", "2.4.6")
        False
        >>> fits("pydantic_core-2.50.4-cp310-cp310-macosx_11_0_arm64.whl", "pydantic_core", "2.50.4")
        False
    """
    try:
        found, its_version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:  # a source archive, or a name that pip would not accept either
        return False
    if found != canonicalize_name(name) or Version(its_version.public) != Version(version):
        return False
    platforms = any(re.match("any|linux|manylinux|macosx", tag.platform) for tag in tags)
    return platforms and any(serves(tag.interpreter, tag.abi) for tag in tags)


def serves(interpreter: str, abi: str) -> bool:
    """Return whether a tag of a wheel includes a supported CPython."""
    if interpreter.startswith("py3"):
        return True
    series = re.fullmatch(r"cp3(\d*)", interpreter)
    return series is not None and (abi in ("abi3", "none") or int(series[1] or 0) >= FIRST_PYTHON)


@contextmanager
def configured_index() -> Iterator[PackageIndex]:
    """Open the indexes of pip's configuration."""
    command = create_command("download")
    with command.main_context():
        options, _ = command.parse_args([])
        indexes = [] if options.no_index else [options.index_url, *options.extra_index_urls]
        yield PackageIndex(command.get_default_session(options), indexes, options.find_links)
