"""The claims of `subquad verify --json`, read from a file, and the cards that show them."""

import json
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.report.part import Material
from subquad_lab.report.picture import image
from subquad_lab.system.files import MAX_JSON_BYTES
from subquad_lab.system.regular_file import read_regular
from subquad_lab.system.text import printable
from subquad_lab.theory.claims import figure as figure_of

PLOTS = "theory"  # folder of the pictures, next to the file
MAX_PICTURE_BYTES = 1 << 20
ON_CARDS = ("number", "statement", "mistake")


def claims(path: Path) -> list[dict[str, Any]]:
    """Read and validate claims from a JSON file, and their pictures from the folder `theory` next to it."""
    try:
        found = json.loads(read_regular(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UsageError(f"--theory: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--theory: {path} is not a valid JSON file: {error}") from error
    rows = found if isinstance(found, list) else []
    if not rows or not all(_is_claim(row) for row in rows):
        raise UsageError(f"--theory: expected the output of `subquad verify --json`, got {path}")
    return [
        {
            **row,
            "checks": [{**check, "shown": figure_of(check["measured"])} for check in row["checks"]],
            "picture": _picture(path.parent / PLOTS / f"claim-{row['number']:02}.svg"),
        }
        for row in rows
    ]


def cards(material: Material) -> list[dict[str, Any]] | None:
    """Return the data of the cards, or None without claims."""
    return [
        {**{key: _shown(claim[key]) for key in ON_CARDS}, "holds": claim["verdict"] != "fails"}
        for claim in material.claims
    ] or None


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _picture(path: Path) -> dict[str, str] | None:
    """Return the picture of a claim, or None if `subquad verify` drew none."""
    try:
        svg = read_regular(path, MAX_PICTURE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"--theory: cannot read {path}: {error.strerror}") from error
    try:
        return image(svg, f"plot of claim {path.stem.removeprefix('claim-').lstrip('0')}")
    except ValueError as error:
        raise UsageError(f"--theory: {path} is not a valid SVG file: {error}") from error


def _is_claim(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("number")) is int
        and all(isinstance(row.get(key), str) for key in ("statement", "verdict", "subject"))
        and "mistake" in row
        and isinstance(row["mistake"], str | None)
        and isinstance(row.get("seconds"), int | float)
        and all(isinstance(row.get(key), list) for key in ("checks", "derivation"))
        and all(isinstance(step, str) for step in row["derivation"])
        and all(_is_check(check) for check in row["checks"])
    )


def _is_check(check: Any) -> bool:
    return (
        isinstance(check, dict)
        and isinstance(check.get("measured"), int | float)
        and all(isinstance(check.get(key), str) for key in ("what", "claimed"))
        and all(isinstance(check.get(key), bool) for key in ("is_mistake", "holds"))
    )
