"""Reader for the output of `subquad verify --json`."""

import json
from pathlib import Path
from typing import Any

from subquad_lab import UsageError
from subquad_lab.report.part import Material
from subquad_lab.system.files import MAX_JSON_BYTES
from subquad_lab.system.regular_file import read_regular
from subquad_lab.theory.claims import figure as figure_of


def claims(path: Path) -> list[dict[str, Any]]:
    """Read and validate claims from a JSON file."""
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
        {**row, "checks": [{**check, "shown": figure_of(check["measured"])} for check in row["checks"]]} for row in rows
    ]


def _is_claim(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("number"), int)
        and all(isinstance(row.get(key), str) for key in ("statement", "verdict", "subject"))
        and isinstance(row.get("seconds"), int | float)
        and isinstance(row.get("checks"), list)
        and all(
            isinstance(check, dict)
            and isinstance(check.get("measured"), int | float)
            and isinstance(check.get("what"), str)
            and isinstance(check.get("claimed"), str)
            and isinstance(check.get("is_mistake"), bool)
            for check in row["checks"]
        )
    )


def cards(material: Material) -> list[dict[str, Any]] | None:
    """Return the data of the cards, or None without claims."""
    return [{"number": claim["number"]} for claim in material.claims] or None
