"""The parts of the page: each has a template, its data, and scripts.

    parts/NAME.html     what it shows without scripts; it gets `data` and `material`
    assets/NAME.css     its own style, if there is such a file
    assets/*.js         its scripts, which register Subquad.parts.NAME = (root, data) => {...}

The page puts the data as JSON into <script type="application/json" id="data-NAME"> and the template into
<section id="NAME" data-part="NAME">; assets/boot.js then calls every part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Material:
    """What the page is about.

    Attributes:
        sections: One per experiment with runs, from `experiments.section`.
        damaged: Reasons why runs are left out, by their places.
        claims: Checked claims, from `claims.claims`.
    """

    sections: Sequence[dict[str, Any]]
    damaged: dict[str, str] = field(default_factory=dict)
    claims: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        name: Name of its template, of its element, and of the function that its scripts register.
        title: Heading, also in the table of contents.
        data: Returns JSON-serializable data for the template and the scripts, or None to leave the part out.
        scripts: Files in assets/, in order.
        written: Returns a script that Python writes; it runs after the files of all parts, and before they start.
        is_fixed: Whether data and script are the same whatever was run, so that a server need make them only once.
    """

    name: str
    title: str
    data: Callable[[Material], Any]
    scripts: tuple[str, ...] = ()
    written: Callable[[], str] | None = None
    is_fixed: bool = False

    def made(self) -> "Part":
        """Return this part with its data and script at hand."""
        data, written = self.data(Material([])), self.written and self.written()
        return replace(self, data=lambda _: data, written=None if written is None else lambda: written)
