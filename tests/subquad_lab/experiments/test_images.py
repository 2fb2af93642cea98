"""Pooling against strides: the published networks, an order that is whole, and verdicts that know chance."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from sklearn.metrics import confusion_matrix, log_loss
from torch import nn

from small_runs import unfinish, write_pictures
from subquad_lab import Diverged, UsageError
from subquad_lab.cli import main
from subquad_lab.commands.predict import read_picture
from subquad_lab.commands.sweep import make_study
from subquad_lab.data.images import load_images
from subquad_lab.experiments import images
from subquad_lab.experiments.images import Config, Images
from subquad_lab.figures.classification import Predictions, figures
from subquad_lab.models import parameters
from subquad_lab.models.images import ConvNet, halved_twice
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.training import snapshot
from subquad_lab.training.run import Run


@pytest.fixture
def small(tmp_path) -> str:
    return str(write_pictures(tmp_path / "small.npz"))


# --- The networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("downsample", "sides"), [("pool", [28, 14, 12, 6]), ("stride", [14, 14, 6, 6])])
def test_the_networks_are_the_published_ones(downsample, sides):
    model = ConvNet(1, 28, 28, 4, downsample, 0.7)
    assert parameters(model)["total"] == 224_892
    counts = [sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert counts == [80, 1168, 184_640, 38_520, 484]
    seen = []
    for layer in (model.first, model.halve, model.second):
        layer.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    out = model.eval()(torch.rand(2, 1, 28, 28))
    assert seen == sides
    assert torch.allclose(out.exp().sum(1), torch.ones(2))
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.7]


@pytest.mark.parametrize("downsample", ["pool", "stride"])
@pytest.mark.parametrize("side", [8, 9, 11, 12, 28, 29, 31, 33, 64])
def test_any_size_that_is_large_enough_fits(downsample, side):
    model = ConvNet(3, side, side + 3, 7, downsample, 0.0)
    assert model(torch.rand(2, 3, side, side + 3)).shape == (2, 7)
    assert halved_twice(7, "pool") < 1 <= halved_twice(8, "pool")
    assert halved_twice(4, "stride") < 1 <= halved_twice(5, "stride")


# --- The task -----------------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_picture_in_an_order_of_its_own(small):
    task = images.build(Config(data=small, batch=8, seed=3))
    assert task.batches == 7  # 50 pictures: the last batch is filled up
    epochs = [torch.cat([task.batch(epoch, i)[0] for i in range(7)]).flatten(1) for epoch in (0, 1)]
    whole = task.pictures.train[0].flatten(1)
    for seen in epochs:
        assert len(seen) == 56
        assert {tuple(row.tolist()) for row in seen[:50]} == {tuple(row.tolist()) for row in whole}
        assert torch.equal(seen[50:], seen[:6])
    assert not torch.equal(*epochs)
    again = images.build(Config(data=small, batch=8, seed=3))
    assert torch.equal(again.batch(1, 4)[0], task.batch(1, 4)[0])  # at once, without the epochs before
    other = images.build(Config(data=small, batch=8, seed=4))
    assert not torch.equal(other.batch(0, 0)[0], task.batch(0, 0)[0])


def test_figures_and_confusion_are_those_of_scikit_learn():
    torch.manual_seed(0)
    scores, wanted = torch.randn(60, 4).log_softmax(-1), torch.arange(60) % 3
    found = figures(scores, wanted)
    assert found["cross_entropy"] == pytest.approx(log_loss(wanted, scores.exp(), labels=range(4)), rel=1e-6)
    predictions = Predictions([*"abcd"], wanted.tolist(), scores.argmax(-1).tolist())
    table = confusion_matrix(wanted, scores.argmax(-1), labels=range(4))
    assert predictions.confusion().tolist() == table.tolist()
    assert found["accuracy"] == pytest.approx(np.trace(table) / 60) == pytest.approx(np.mean(predictions.right))
    assert predictions.by_class() == pytest.approx({name: table[i, i] / 20 for i, name in enumerate("abc")})  # d: none


def test_bytes_are_divided_by_256(small):
    task = images.build(Config(data=small, batch=8))
    seen = []
    task.model.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    task.loss(task.model, task.batch(0, 0), {})
    assert torch.equal(seen[0], task.batch(0, 0)[0].float() / 256)


def test_the_published_preset_is_the_published_run():
    config = config_from(images.EXPERIMENT, read(presets("images")["published"]), "published")
    assert config == Config(
        seed=42, seeds=1, epochs=15, batch=8, optimizer="sgd", lr=0.01, momentum=0.0, weight_decay=0.0, patience=None,
        weights="last", dropout=0.7, published_test=True,
    )  # fmt: skip


def test_the_published_test_images_are_the_first_of_each_class(tmp_path):
    draw = np.random.default_rng(0)
    labels = draw.integers(4, size=(1200, 1)).astype(np.uint8)
    pictures = draw.integers(256, size=(1200, 12, 12)).astype(np.uint8)
    file = write_pictures(tmp_path / "octmnist.npz", classes=4, test_images=pictures, test_labels=labels)
    with pytest.warns(UserWarning, match=r"octmnist.npz: expected MD5 c68d92"):
        task = images.build(Config(data=str(file), published_test=True))
    kept = {i: np.flatnonzero(labels[:, 0] == i)[:count] for i, count in enumerate((182, 55, 42, 250))}
    rows = np.sort(np.concatenate(list(kept.values())))
    assert len(rows) == 529
    assert np.array_equal(task.parts["test"][0][:, 0], pictures[rows])
    assert np.array_equal(task.parts["test"][1], labels[rows, 0])
    about = task.about()["data"]
    assert (about["name"], about["published_test"], about["sizes"]["test"]) == ("OCTMNIST, changed", True, 529)
    assert about["classes"] == ["CNV", "DME", "drusen", "normal"]
    with pytest.warns(UserWarning, match="MD5"):
        assert len(images.build(Config(data=str(file))).parts["test"][1]) == 1200
    few = write_pictures(tmp_path / "octmnist.npz", classes=4)
    with pytest.warns(UserWarning, match="MD5"), pytest.raises(UsageError, match=r"published_test: expected \(182, 55"):
        images.build(Config(data=str(few), published_test=True))
    other = write_pictures(tmp_path / "octmnist_224.npz")
    assert images.build(Config(data=str(other), published_test=True)).is_published_test is False


def test_other_data_are_tested_whole(small):
    task = images.build(Config(data=small, published_test=True))
    assert len(task.parts["test"][1]) == 21
    assert task.about()["data"]["published_test"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(batch=51), "batch: expected at most 50, the number of training images of SMALL, got 51"),
        (dict(dropout=1.0), r"dropout: expected a number in \[0, 1\), got 1.0"),
        (dict(seeds=0), "seeds: expected a positive integer, got 0"),
        (dict(seed=2**32 - 2), r"seed: expected an integer in \[0, 2\^32"),
    ],
)
def test_configs_that_do_not_fit_are_told(change, message, small):
    with pytest.raises(UsageError, match=message):
        images.build(Config(data=small, **change))


def test_pictures_that_are_too_small_or_too_large_are_told(tmp_path, monkeypatch):
    parts = {f"{part}_images": np.zeros((n, 6, 6), np.uint8) for part, n in (("train", 50), ("val", 20), ("test", 21))}
    tiny = str(write_pictures(tmp_path / "tiny.npz", **parts))
    with pytest.raises(UsageError, match="expected images of at least 8x8, got 6x6 in TINY"):
        images.build(Config(data=tiny))
    images.build(Config(data=tiny, downsample="stride"))
    monkeypatch.setattr("subquad_lab.models.memory", lambda: 10**5)
    with pytest.raises(UsageError, match="--data: a network for images of 6x6 needs 0 GiB for training"):
        images.build(Config(data=tiny, downsample="stride"))


def test_probabilities_that_are_no_numbers_end_the_run():
    """Else the first class would be the likeliest, and its share a respectable accuracy."""
    with pytest.raises(Diverged, match="the probabilities are NaN"):
        figures(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.int64))


# --- Commands -----------------------------------------------------------------------------------------------------

QUICK = ["--epochs=3", "--batch=10", "--lr=0.05"]


def test_train_makes_a_series_with_pictures_and_a_summary(small, tmp_path, capfd):
    assert main(["train", "images", f"--data={small}", f"--out={tmp_path}", "--seeds=2", *QUICK]) == 0
    shown = capfd.readouterr().out
    folder = tmp_path / "images-001"
    runs = [Run(folder / f"seed-{seed}") for seed in (0, 1)]
    values = [run.result()["test"]["accuracy"] for run in runs]
    head = "^test, mean of 2 seeds and 95 % confidence interval: "
    assert re.search(rf"{head}accuracy {np.mean(values):.4g} (\+- |\()", shown)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test"]["accuracy"]["values"] == values
    assert summary["test"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    for run in runs:
        predictions = Predictions.of(run.folder)
        assert np.mean(predictions.right) == pytest.approx(run.result()["test"]["accuracy"])
        assert b"<svg" in (run.folder / "confusion.svg").read_bytes()
    assert b"<svg" in (folder / "curves.svg").read_bytes()
    assert main(["train", "--resume", str(folder)]) == 0  # All is there: nothing is trained again.
    assert capfd.readouterr() == (shown, "")
    assert main(["evaluate", str(folder)]) == 0
    best = max(runs, key=lambda run: run.result()["valid"]["accuracy"])
    out, err = capfd.readouterr()
    assert out.startswith(f"accuracy {best.result()['test']['accuracy']:.4g}")
    assert f"using {best.folder}, the best of 2 finished runs by validation accuracy" in err


def test_the_training_loss_of_an_epoch_is_its_mean(small, tmp_path):
    from subquad_lab.figures.plots import by_epoch

    assert main(["train", "images", f"--data={small}", f"--out={tmp_path}", "--seeds=1", *QUICK]) == 0
    run = Run(tmp_path / "images-001")
    steps = [line["loss"] for line in run.metrics() if "loss" in line]
    accuracy = [line["valid/accuracy"] for line in run.metrics() if "valid/accuracy" in line]
    losses, measures = by_epoch([run], "accuracy")
    assert losses == [(i + 1.0, pytest.approx(np.mean(steps[5 * i : 5 * i + 5]))) for i in range(3)]
    assert measures == [(i + 1.0, accuracy[i]) for i in range(3)]
    both, _ = by_epoch([run, run], "accuracy")
    assert both == losses


def test_curves_of_several_runs_end_with_the_first_that_stopped(small, tmp_path):
    """Means over those that went on alone would bend for no reason."""
    from subquad_lab.figures.plots import by_epoch

    for epochs in (2, 4):
        out = f"--out={tmp_path / str(epochs)}"
        assert main(["train", "images", f"--data={small}", out, "--seeds=1", f"--epochs={epochs}", *QUICK[1:]]) == 0
    runs = [Run(tmp_path / str(epochs) / "images-001") for epochs in (2, 4)]
    for points in by_epoch(runs, "accuracy"):
        assert [epoch for epoch, _ in points] == [1.0, 2.0]


def test_other_data_are_not_averaged_nor_compared(small, tmp_path, capfd):
    out = tmp_path / "compare"
    arguments = ["compare", "images", f"--data={small}", f"--out={out}", "--seeds=2", "--steps=2"]
    assert main(arguments) == 0
    write_pictures(tmp_path / "small.npz", val_images=np.zeros((20, 12, 12), np.uint8))
    unfinish(out / "stride" / "seed-1")
    shutil.rmtree(out / "stride" / "seed-1")
    capfd.readouterr()
    assert main(["train", "--resume", str(out / "stride")]) == 2
    assert "the data differ from those of" in capfd.readouterr().err
    shutil.rmtree(out / "stride")
    assert main(arguments) == 2
    assert "the data differ from those of" in capfd.readouterr().err


def test_data_that_are_wrong_leave_no_folder(tmp_path, complaint):
    complaint(["train", "images", "--data=nowhere", f"--out={tmp_path / 'runs'}"])
    assert not (tmp_path / "runs").exists()


def test_a_sweep_draws_a_line_for_each_rate(small, tmp_path, capfd):
    out = tmp_path / "sweep"
    rates = "--grid.lr=0.1,0.01,0.0001"
    assert main(["sweep", "images", f"--data={small}", f"--out={out}", "--seeds=2", rates, "--epochs=10"]) == 0
    lines = capfd.readouterr().out.splitlines()
    values = [float(re.search(r"validation accuracy ([\d.]+)", line)[1]) for line in lines[:3]]
    assert values == sorted(values, reverse=True)  # the best first
    assert values[0] > values[-1] + 0.2
    assert make_study(out, "maximize").best_value == pytest.approx(values[0], abs=1e-4)
    for rate in ("0.1", "0.01", "0.0001"):
        assert f"lr {rate} " in (out / "sweep.svg").read_text()
    folder = re.match(r"trial-\d+", lines[0])[0]
    means = [Run(out / folder / f"seed-{seed}").result()["valid"]["accuracy"] for seed in (0, 1)]
    assert values[0] == pytest.approx(np.mean(means), abs=1e-4)


def test_compare_says_whether_a_difference_is_larger_than_chance(small, tmp_path, capfd):
    out = tmp_path / "compare"
    assert main(["compare", "images", f"--data={small}", f"--out={out}", "--seeds=3", *QUICK]) == 0
    shown = capfd.readouterr().out
    assert "over 3 seeds and 21 test examples" in shown
    found = re.search(r"pool minus stride: accuracy ([+-][\d.]+) \+- ([\d.]+): (.*)", shown)
    mean, half = float(found[1]), float(found[2])
    assert found[3] == ("significant" if abs(mean) > half else "not significant")
    right = np.array([[Predictions.of(out / how / f"seed-{seed}").right for seed in range(3)]
                      for how in ("pool", "stride")])  # fmt: skip
    means = right.mean((1, 2))
    assert mean == pytest.approx(means[0] - means[1], abs=1e-4)
    parts = right.mean(2).var(1, ddof=1) / 3
    shares = right.mean(1)
    spread = parts.sum() + (shares[0] - shares[1]).var(ddof=1) / 21
    freedom = parts.sum() ** 2 / (parts**2 / 2).sum() if parts.any() else 4
    assert half == pytest.approx(stats.t.ppf(0.975, freedom) * spread**0.5, abs=1e-4)
    content = json.loads((out / "compare.json").read_text())
    assert content["stride"]["first_minus_this"]["mean"] == pytest.approx(means[0] - means[1])


def test_predict_says_class_and_probability(small, tmp_path, capfd):
    assert (
        main(["train", "images", f"--data={small}", f"--out={tmp_path}", "--seeds=1", "--epochs=20", "--lr=0.05"]) == 0
    )
    pictures, classes = load_images(small).test
    files = []
    for i in range(6):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(pictures[i, 0].numpy()).save(files[-1])
    Image.fromarray(pictures[0, 0].numpy()).resize((48, 48)).convert("RGBA").save(tmp_path / "large.png")
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "images-001"), *files, str(tmp_path / "large.png")]) == 0
    lines = capfd.readouterr().out.splitlines()
    wanted = [*classes[:6].tolist(), int(classes[0])]
    for file, line, label in zip([*files, tmp_path / "large.png"], lines, wanted, strict=True):
        name, chance = re.fullmatch(rf"{re.escape(str(file))}: (\d), probability (0\.\d+|1\.000)", line).groups()
        assert int(name) == label
        assert float(chance) > 1 / 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A run that has hardly begun, and is only read."""
    root = tmp_path_factory.mktemp("images")
    data = write_pictures(root / "small.npz")
    assert main(["train", "images", f"--data={data}", f"--out={root}", "--seeds=1", "--steps=1"]) == 0
    return str(root / "images-001")


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, b"hello"])
def test_files_that_are_no_pictures_are_told(content, run, tmp_path, complaint):
    (tmp_path / "x.png").write_bytes(content)
    assert f"IMAGES: {tmp_path / 'x.png'} cannot be read as an image" in complaint(
        ["predict", run, str(tmp_path / "x.png")]
    )
    assert "IMAGES: cannot read nowhere.png: No such file or directory" in complaint(["predict", run, "nowhere.png"])
    assert "IMAGES" in complaint(["predict", run])


def test_one_bad_file_does_not_keep_the_others_from_being_predicted(run, tmp_path, capfd):
    bad, first, last = (str(tmp_path / name) for name in ("bad.png", "first.png", "last.png"))
    (tmp_path / "bad.png").write_bytes(b"hello")
    for file in (first, last):
        Image.new("L", (12, 12), 99).save(file)
    assert main(["predict", run, first, bad, "nowhere.png", last]) == 2
    out, err = capfd.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [first, last]
    assert err.splitlines()[0].startswith(f"subquad: warning: IMAGES: {bad} cannot be read as an image")
    assert err.splitlines()[1:] == [
        "subquad: warning: IMAGES: cannot read nowhere.png: No such file or directory",
        "subquad: error: IMAGES: 2 of 4 files cannot be used",
    ]
    assert main(["predict", run, bad, bad]) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("is_light", [True, False])
def test_predict_says_when_a_picture_has_the_opposite_polarity(is_light, tmp_path, capfd):
    squares = np.zeros((50, 12, 12), np.uint8)
    squares[:, 3:9, 3:9] = 200
    data = squares if is_light else 255 - squares
    parts = {f"{part}_images": data[:count] for part, count in (("train", 50), ("val", 20), ("test", 21))}
    file = write_pictures(tmp_path / "squares.npz", **parts)
    assert main(["train", "images", f"--data={file}", f"--out={tmp_path}", "--seeds=1", "--steps=1"]) == 0
    same, opposite, plain = (str(tmp_path / f"{name}.png") for name in ("same", "opposite", "plain"))
    Image.fromarray(data[0]).save(same)
    Image.fromarray(255 - data[0]).save(opposite)
    Image.new("L", (12, 12), 255).save(plain)
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "images-001"), same, opposite, plain]) == 0
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 3
    found, usual = ("dark on light", "light on dark") if is_light else ("light on dark", "dark on light")
    assert err == (
        f"subquad: warning: {opposite} is {found}, but the model was trained on images that are {usual}; invert it\n"
    )


def test_pictures_with_16_bits_and_with_transparency_are_what_they_look_like(tmp_path):
    ramp = np.tile(np.linspace(0, 65535, 28), (28, 1)).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    found = read_picture(tmp_path / "deep.png", 1, 28, 28)
    assert (found[0].int() - torch.from_numpy(ramp // 257).int()).abs().max() <= 1
    ink = Image.new("RGBA", (28, 28), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (10, 10, 20, 20))
    ink.save(tmp_path / "ink.png")
    found = read_picture(tmp_path / "ink.png", 3, 28, 28)
    assert found[:, 15, 15].tolist() == [0, 0, 0]
    assert found[:, 2, 2].tolist() == [255, 255, 255]


def test_no_program_is_started_for_a_picture(run, tmp_path, complaint, monkeypatch):
    """Pillow would hand PostScript to Ghostscript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'executed'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    assert "cannot be read as an image" in complaint(["predict", run, str(tmp_path / "x.png")])
    assert not (tmp_path / "executed").exists()


def test_a_picture_that_would_fill_the_memory_is_refused(run, tmp_path, complaint, monkeypatch):
    Image.new("L", (64, 64)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    line = complaint(["predict", run, str(tmp_path / "bomb.png")])
    assert "bomb.png cannot be read as an image: " in line


def test_a_language_model_does_not_predict_pictures(trained, tmp_path, complaint):
    line = complaint(["predict", str(trained), "x.png"])
    assert f"RUN: expected a run of an image model, got {trained}" in line


def test_the_network_learns_the_embedded_digits():
    snapshot.seed_all(0)
    task = Images(Config(batch=16), load_images())
    optimizer = torch.optim.SGD(task.model.parameters(), 0.02, 0.9)
    for step in range(300):
        task.loss(task.model, task.batch(step // task.batches, step % task.batches), {})[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    task.model.eval()
    assert task.evaluate("test", lambda: None)["accuracy"] > 0.85
