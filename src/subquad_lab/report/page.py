"""The HTML report: one file that contains its scripts, styles, data and pictures, and loads nothing.

The content security policy allows exactly the scripts and styles that this file puts in, by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

import subquad
from subquad_lab import UsageError
from subquad_lab.report import claims, cost_data, experiments, head_data, needle_data, summary
from subquad_lab.report.part import Material, Part
from subquad_lab.report.reading import Reader
from subquad_lab.system.text import printable
from subquad_lab.training.run import Run

FOLDER = Path(__file__).parent
ASSETS, VENDOR = FOLDER / "assets", FOLDER / "vendor"
PARTS = (
    Part("experiments", "Experiments", experiments.plots, scripts=("experiments.js",)),
    Part(
        "cost", "What would it cost?", cost_data.data, scripts=("python.js", "cost.js"), written=cost_data.model,
        is_fixed=True,
    ),
    Part(
        "head", "Look into a head", lambda _: head_data.head_data(),
        scripts=("controls.js", "head_methods.js", "head_multipole.js", "head_reasons.js", "head.js"),
        is_fixed=True,
    ),
    Part(
        "needle", "The needle", lambda _: needle_data.needle_data(), scripts=("controls.js", "needle.js"),
        is_fixed=True,
    ),
    Part("claims", "The theory, checked", claims.cards, scripts=("claims.js",)),
)  # fmt: skip  # in the order of the page


def page(
    runs: list[Run], theory: Sequence[dict[str, Any]] = (), live: Part | None = None, parts: Sequence[Part] = PARTS,
    reader: Reader | None = None,
) -> str:  # fmt: skip
    """Return the report as HTML. Text from records is escaped; plots are drawn from the metrics.

    A damaged run is listed, with a warning, and left out. If no other run is left, a page that is not live raises a
    UsageError.

    Args:
        runs: Runs to report.
        theory: Checked claims, from `claims.claims`.
        live: A part that receives news from a server: the page that contains it may connect to where it came from.
        parts: The other parts; a server makes the fixed ones once.
        reader: Reads the runs; a server keeps one, to read only what has changed.
    """
    sections, damaged = experiments.sections(runs, reader or Reader())
    if not sections and live is None:
        raise UsageError(next(iter(damaged.values())))
    material = Material(sections, damaged, theory)
    shown = [] if live is None else [(live, live.data(material))]
    shown += [(part, data) for part in parts if (data := part.data(material)) is not None]
    scripts = [VENDOR / "uplot.js", ASSETS / "subquad.js", ASSETS / "plot.js"]
    # Parts may share a script.
    scripts += dict.fromkeys(ASSETS / name for part, _ in shown for name in part.scripts)
    written = [part.written() for part, _ in shown if part.written is not None]
    boot = (ASSETS / "boot.js").read_text()
    styles = [VENDOR / "uplot.css", ASSETS / "page.css"]
    styles += [file for part, _ in shown if (file := ASSETS / f"{part.name}.css").is_file()]
    code = [embedded(text) for text in (*(file.read_text() for file in scripts), *written, boot)]
    design = [embedded(file.read_text()) for file in styles]
    places = {part.name for part, _ in shown} | {f"experiment-{section['name']}" for section in sections}
    return environment().get_template("page.html").render(
        parts=shown, material=material, version=subquad.__version__, scripts=code, styles=design,
        headlines=summary.headlines(material), places=places, machine=summary.environment(),
        runs=summary.what_was_run(material),
        policy=policy(code, design, "'none'" if live is None else "'self'"),
        license=escape((VENDOR / "uplot.LICENSE").read_text()),
    )  # fmt: skip


def environment() -> Environment:
    """Return the templates, which escape all text and show control characters."""
    found = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )  # fmt: skip
    found.filters["json"] = as_json
    return found


def policy(scripts: Sequence[Markup], styles: Sequence[Markup], connect: str) -> str:
    """Return the content security policy of the page."""
    code, design = (" ".join(map(hash_of, contents)) for contents in (scripts, styles))
    return (
        f"default-src 'none'; script-src {code}; style-src {design}; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def hash_of(content: str) -> str:
    """Return the source expression that allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def embedded(code: str) -> Markup:
    """Return a file of this package as the content of a script or style element."""
    if "</" in code or "<!--" in code:
        raise ValueError("a script or style must not contain '</' or '<!--', which could end its element")
    return Markup(code)


def as_json(data: Any) -> Markup:
    r"""Return data as JSON that cannot end the script element that contains it.

    >>> print(as_json({"name": "</script>&"}))
    {"name":"\u003c/script\u003e\u0026"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
