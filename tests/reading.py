"""Reading what runs have written, apart from the code that wrote it."""

from pathlib import Path

import yaml


def read_config(folder: Path) -> dict:
    content = yaml.safe_load((folder / "config.yaml").read_text())
    assert content.pop("experiment") == "language"
    return content
