"""The data of the cost explorer, without a browser."""

import json

import pytest

from subquad.planning import calibration as calibrating
from subquad_lab.report import cost_data
from subquad_lab.report.cost_explorer import Settings, choice_at, faster_from, measures_at, plan_at
from subquad_lab.report.part import Material

MAX_SCRIPT_BYTES = 200_000


def test_sliders_and_switches_are_the_settings() -> None:
    data = cost_data.data(Material([]))
    names = [each["name"] for each in (*data["sliders"], *data["switches"])]
    assert names == list(Settings.__dataclass_fields__) == list(data["start"])
    for slider in data["sliders"]:
        assert slider["values"] == sorted(set(slider["values"])) and data["start"][slider["name"]] in slider["values"]
    assert json.loads(json.dumps(data)) == data


def test_the_table_is_that_of_the_library() -> None:
    data, machine = cost_data.data(Material([])), cost_data.machine()
    plan = plan_at(cost_data.START, machine)
    assert f"{data['choice']}: {data['reason']}" == plan.reason and plan.choice == choice_at(cost_data.START, machine)
    assert [row[0] for row in data["rows"]] == [row.name for row in measures_at(cost_data.START, machine)]
    # 8 heads of 16384 * 16385 / 2 pairs, at 16 * 2e-11 s each; an output of 8 * 16384 * 16 numbers, and one per row
    assert data["rows"][0][1:] == ["344 ms", "1 x", "", "8.5 MiB", "0"]


def test_the_length_from_which_a_method_is_faster() -> None:
    machine = cost_data.machine()
    exact, taylor, *_ = faster_from(cost_data.START, machine)
    assert exact is None and 100 < taylor < 10_000
    for factor, is_faster in ((0.9, False), (1.1, True)):
        at = Settings(**{**vars(cost_data.START), "length": int(taylor * factor)})
        rows = measures_at(at, machine)
        assert (rows[1].seconds < rows[0].seconds) is is_faster


def test_the_script_is_small_and_nothing_left_out_is_unknown(monkeypatch) -> None:
    text = cost_data.model()
    assert 50_000 < len(text) < MAX_SCRIPT_BYTES
    for name in cost_data.LEFT_OUT:
        if name != "torch.Tensor":  # which no function of the script names
            assert name.rpartition(".")[2] in text, f"{name} is not needed any more"


def test_a_machine_that_is_not_calibrated_is_not_measured(monkeypatch, tmp_path) -> None:
    def refuse(*_):
        raise AssertionError("the report measured the machine")

    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrating, "measured_seconds", refuse)
    data = cost_data.data(Material([]))
    assert not data["calibrated"] and "reference figures" in data["reason"]
    assert "reference figures" in cost_data.model()


def test_without_kernels_there_are_no_times_of_windows(torch_alone) -> None:
    names = [row.name for row in measures_at(cost_data.START, cost_data.machine())]
    assert names[0] == "Exact()" and not any(name.startswith(("Window", "Multipole")) for name in names)


def test_a_missing_fact_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(cost_data, "FACTS", ("subquad.native.available",))
    with pytest.raises(ValueError, match=r"is not in the Python that the page can run|expected a function of subquad"):
        cost_data.model()
