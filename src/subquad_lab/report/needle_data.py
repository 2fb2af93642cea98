"""The needle experiment of the page, as `tools/page_needle.py` measured it: needle.json."""

import json
from typing import Any

from subquad_lab.report.head_data import DATA

NEEDLE = DATA / "needle.json"


def needle_data() -> dict[str, Any]:
    """Return the measurements, and for each method how often it finds the needle in a text of each length."""
    found = json.loads(NEEDLE.read_text())
    counts = [
        [sum(place["methods"][number]["is_found"] for place in length["places"]) for length in found["lengths"]]
        for number in range(len(found["methods"]))
    ]
    return {**found, "counts": counts}
