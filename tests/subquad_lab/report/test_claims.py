"""Claims from a file: complete or refused, with their pictures."""

import json
from urllib.parse import unquote

import pytest

from subquad_lab import UsageError
from subquad_lab.report.claims import cards, claims
from subquad_lab.report.part import Material

CHECK = {"what": "a ratio", "measured": 1.0, "claimed": "= 1", "holds": True, "is_mistake": False}
CLAIM = {
    "number": 4, "subject": "attention", "statement": "It holds.", "mistake": None, "verdict": "holds", "seconds": 0.1,
    "derivation": ["Because."], "checks": [CHECK],
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "verify.json"
    path.write_text(json.dumps([CLAIM]))
    return path


def test_a_picture_is_read_from_the_folder_next_to_the_file(file):
    assert claims(file)[0]["picture"] is None
    (file.parent / "theory").mkdir()
    picture = file.parent / "theory" / "claim-04.svg"
    picture.write_text("<?xml version='1.0'?>\n<svg id=\"a\">\n<script>alert(1)</script></svg>")
    (found,) = claims(file)
    assert found["picture"]["text"] == "plot of claim 4"
    kind, _, content = found["picture"]["source"].partition(",")
    assert kind == "data:image/svg+xml" and unquote(content) == '<svg id="a"> <script>alert(1)</script></svg>'
    assert '"' not in content and "<" not in content
    picture.write_text("not a picture")
    with pytest.raises(UsageError, match=r"claim-04\.svg is not a valid SVG file"):
        claims(file)


@pytest.mark.parametrize(
    "change",
    [{"number": "4"}, {"number": True}, {"mistake": 1}, {"derivation": [1]}, {"derivation": None}, {"checks": [{}]},
     {"checks": [CHECK | {"holds": None}]}],
)  # fmt: skip
def test_a_claim_of_the_wrong_kind_is_refused(file, change):
    file.write_text(json.dumps([CLAIM | change]))
    with pytest.raises(UsageError, match="expected the output of `subquad verify --json`"):
        claims(file)


def test_a_claim_without_the_entry_for_a_mistake_is_refused(file):
    file.write_text(json.dumps([{key: value for key, value in CLAIM.items() if key != "mistake"}]))
    with pytest.raises(UsageError, match="expected the output of `subquad verify --json`"):
        claims(file)


def test_cards_have_the_answer_and_no_control_characters():
    found = cards(Material([], claims=[CLAIM | {"statement": "a\x1bb"}, CLAIM | {"verdict": "fails"}]))
    assert [each["holds"] for each in found] == [True, False]
    assert found[0]["statement"] == r"a\x1bb"
    assert cards(Material([])) is None
