"""Every script in benchmarks/ parses its arguments: --help explains it, instead of an hour of measurements."""

from pathlib import Path

import pytest

from packages import script

SCRIPTS = [path for path in sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
           if "__main__" in path.read_text()]  # fmt: skip
cost, features = script("cost"), script("features")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_parse_their_arguments(path):
    assert "ArgumentParser(" in path.read_text()


@pytest.mark.parametrize("name", ["cost", "features"])
def test_help_measures_nothing(name, request, capsys):
    benchmark = request.getfixturevalue(name)
    for arguments, code in ((["--help"], 0), (["--quik"], 2)):
        with pytest.raises(SystemExit) as ended:
            benchmark.main(arguments)
        assert ended.value.code == code
    assert "benchmarks/results/" in capsys.readouterr().out
