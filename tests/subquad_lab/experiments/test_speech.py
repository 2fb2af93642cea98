"""Speech to characters: the published networks, padding that is not seen, decoding that is right, and the commands."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from small_runs import SPEECH_OPTIONS, reseal
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.data.speech import END, PAD, START, characters
from subquad_lab.experiments import speech
from subquad_lab.experiments.speech import Config, make_model, measures, side_by_side, spelled
from subquad_lab.figures.plots import curves
from subquad_lab.figures.similarity import damerau, error_rate
from subquad_lab.models import parameters
from subquad_lab.models.speech import Speech, sinusoids, spell
from subquad_lab.options.fields import config_from, presets, read
from subquad_lab.training.run import RESULT, Run
from subquad_lab.training.schedule import Progress, rate

METHODS = ["exact", "taylor:2", "random:16", "linear:elu", "separable"]
DECODERS = ["lstm", "attention"]
SMALL = dict(width=8, heads=2, blocks=1)


def network(seed: int = 0, **changes) -> Speech:
    torch.manual_seed(seed)
    return make_model(Config(**SMALL | dict(characters=12) | changes)).eval()


def some_sound(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(len(lengths), max(lengths), 80, generator=torch.Generator().manual_seed(1)), torch.tensor(
        lengths
    )


# --- The networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decoder", "count"), [("lstm", 658_435), ("attention", 517_035)])
def test_the_networks_have_the_published_numbers_of_parameters(decoder, count):
    found = parameters(make_model(Config(decoder=decoder, characters=97)))
    assert found == {"encoder": 812_800, "decoder": count, "total": 812_800 + count}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("method", METHODS)
def test_padding_is_seen_by_no_layer(decoder, method):
    model = network(decoder=decoder, method=method)
    frames, lengths = some_sound(21, 40, 7)
    tokens = torch.randint(4, 35, (3, 6), generator=torch.Generator().manual_seed(2))
    beside = model(frames, lengths, tokens)
    garbage = frames + 1e3 * (torch.arange(40) >= lengths[:, None])[..., None]
    assert torch.allclose(model(garbage, lengths, tokens), beside, atol=1e-6)
    for i, length in enumerate(lengths.tolist()):
        alone = model(frames[i : i + 1, :length], lengths[i : i + 1], tokens[i : i + 1])
        assert torch.allclose(alone, beside[i : i + 1], atol=2e-5), i
    for i, length in enumerate(lengths.tolist()):  # What is no padding is seen, to the last frame.
        louder = frames.clone()
        louder[i, length - 1] += 5
        assert not torch.allclose(model(louder, lengths, tokens)[i], beside[i], atol=1e-3), i
    assert model.encoder(frames, lengths)[1].sum(1).tolist() == [11, 20, 4]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_goes_on_where_it_was(decoder, method):
    """By one character or by many: the scores are those of the whole text at once."""
    model = network(decoder=decoder, decoder_method=method)
    frames, lengths = some_sound(21, 40)
    tokens = torch.randint(4, 35, (2, 9), generator=torch.Generator().manual_seed(2))
    whole, seen = model(frames, lengths, tokens), model.seen(frames, lengths)
    for sizes in ([1] * 9, [4, 1, 4], [9]):
        state, parts = model.decoder.start(2), []
        for piece in tokens.split(sizes, 1):
            scores, state = model.decoder(piece, seen, state)
            parts.append(scores)
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_character_sees_none_that_comes_later(decoder):
    model = network(decoder=decoder)
    frames, lengths = some_sound(30)
    tokens = torch.full((1, 8), 5)
    changed = tokens.clone()
    changed[:, 5:] = 9
    assert torch.equal(model(frames, lengths, tokens)[:, :5], model(frames, lengths, changed)[:, :5])


def test_positions_are_sines_and_cosines_of_many_lengths():
    found = sinusoids(50, 10)
    assert torch.allclose(found[:, 0], torch.arange(50.0).sin())
    assert torch.allclose(found[:, 5], torch.arange(50.0).cos())
    assert torch.allclose(found[:, 9], (torch.arange(50.0) / 10_000).cos())


def test_maps_show_where_the_decoder_looks():
    model = network(decoder="attention")
    frames, lengths = some_sound(21, 40)
    looks = model.look(frames, lengths, torch.full((2, 3), 5))
    assert looks.shape == (2, 2, 3, 20)
    assert torch.allclose(looks.sum(-1), torch.ones(2, 2, 3))
    assert not looks[0, ..., 11:].any()  # padding
    seen = model.seen(frames, lengths)
    x, _ = model.decoder.before_cross(torch.full((2, 3), 5), None)
    normed, attention = model.decoder.cross.norms[0](x), model.decoder.cross.attention
    assert torch.allclose(attention._join(looks @ seen[1]), attention(normed, seen), atol=1e-6)


# --- Spelling -----------------------------------------------------------------------------------------------------


def score(model: Speech, frames: torch.Tensor, lengths: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Log probabilities of the characters of a text, and not of those that are never spelled."""
    logits = model(frames, lengths, torch.tensor([[START, *text[:-1]]]))[0]
    logits[:, [START, PAD]] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("method", ["exact", "taylor:2"])
def test_greedy_spelling_takes_the_likeliest_each_time(decoder, method):
    model = network(decoder=decoder, decoder_method=method)
    frames, lengths = some_sound(21, 40, 12)
    together = spell(model, frames, lengths, START, END, [START, PAD], 12)
    for i in range(3):
        text: list[int] = []
        while len(text) < 12:
            logits = model(frames[i : i + 1], lengths[i : i + 1], torch.tensor([[START, *text]]))[0, -1]
            logits[[START, PAD]] = -torch.inf
            best = int(logits.argmax())
            if best == END:
                break
            text.append(best)
        assert together[i] == text


@pytest.mark.parametrize("decoder", DECODERS)
def test_many_beams_find_the_best_of_all_texts(decoder):
    """With as many beams as there are texts nothing is lost: compared with every text of up to 3 of 4 characters."""
    never = [START, PAD, *range(7, 35)]  # leaves END, UNKNOWN and three letters
    model = network(decoder=decoder, seed={"lstm": 2, "attention": 0}[decoder])
    frames, lengths = some_sound(16, 25)
    with torch.no_grad():  # so that a character depends on those before it, and few texts end at once
        model.decoder.out.weight *= 3
        model.decoder.embedding.weight *= 6
        model.decoder.out.bias[END] -= 0.5
    found = spell(model, frames, lengths, START, END, never, 3, beams=80)
    assert found != spell(model, frames, lengths, START, END, never, 3)  # Greedily it is missed.
    for i in range(2):
        best, best_score = None, -math.inf
        for size in range(4):
            for text in itertools.product([3, 4, 5, 6], repeat=size):
                whole = [*text, END] if size < 3 else [*text]
                logits = model(frames[i : i + 1], lengths[i : i + 1], torch.tensor([[START, *whole[:-1]]]))[0]
                logits[:, never] = -torch.inf
                each = logits.log_softmax(-1).gather(1, torch.tensor(whole)[:, None])
                if each.mean().item() > best_score:
                    best, best_score = list(text), each.mean().item()
        assert found[i] == best


def test_more_beams_find_likelier_texts():
    likelier = 0
    for seed in range(8):
        model = network(seed=seed, decoder="attention")
        with torch.no_grad():
            model.decoder.out.weight *= 6
        frames, lengths = some_sound(20)
        one, many = (spell(model, frames, lengths, START, END, [START, PAD], 6, beams)[0] for beams in (1, 16))
        with_end = [[*text, END] if len(text) < 6 else text for text in (one, many)]
        first, second = (score(model, frames, lengths, text).mean().item() for text in with_end)
        assert second >= first - 1e-5
        likelier += second > first + 1e-5
    assert likelier >= 2


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("beams", [1, 3])
def test_clips_do_not_touch_each_other(decoder, beams):
    model = network(decoder=decoder, seed=5)
    frames, lengths = some_sound(21, 40, 12)
    together = spell(model, frames, lengths, START, END, [START, PAD], 12, beams)
    for i, length in enumerate(lengths.tolist()):
        alone = spell(model, frames[i : i + 1, :length], lengths[i : i + 1], START, END, [START, PAD], 12, beams)
        assert alone == [together[i]]


def test_an_end_at_once_is_an_empty_text():
    model = network()
    with torch.no_grad():
        model.decoder.out.bias[END] = 1e4
    assert spell(model, *some_sound(20, 9), START, END, [START, PAD], 12, 2) == [[], []]


# --- The task -----------------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_clip_and_batches_are_of_like_length(digits):
    task = speech.build(Config(data=digits, clips=120, batch=8, **SMALL))
    assert task.batches == 13  # of 100 clips: the last batch is filled up
    epochs = []
    for epoch in (0, 1):
        order = task._ordered(epoch)
        assert sorted(order.unique().tolist()) == list(range(100))
        assert len(order) == 104
        lengths = task.clips.train.lengths[order].view(13, 8).float()
        assert lengths.std(1).mean() < 0.3 * lengths.std()
        epochs.append(order)
    assert not torch.equal(*epochs)
    frames, lengths, tokens = task.batch(1, 4)
    again = speech.build(Config(data=digits, clips=120, batch=8, **SMALL)).batch(1, 4)
    assert all(torch.equal(a, b) for a, b in zip((frames, lengths, tokens), again, strict=True))
    for row, length, text in zip(frames, lengths, tokens, strict=True):
        assert not row[length:].any()
        assert text[0] == START
        assert (text == END).sum() == 1
        assert (text[text.tolist().index(END) + 1 :] == PAD).all()


def test_the_loss_is_the_mean_of_the_clips_and_padding_does_not_count(digits):
    task = speech.build(Config(data=digits, clips=36, batch=6, dropout=0.0, smoothing=0.1, **SMALL))
    task.model.eval()
    rows = task.batch(0, 0)
    whole = task.loss(task.model, rows, {})[0]
    each = []
    for i in range(6):
        frames, lengths, tokens = (x[i : i + 1] for x in rows)
        text = tokens[:, : tokens[0].tolist().index(END) + 1]
        logits = task.model(frames[:, : lengths[0]], lengths, text[:, :-1])
        each.append(F.cross_entropy(logits[0], text[0, 1:], label_smoothing=0.1))
    assert torch.allclose(torch.stack(each).mean(), whole, atol=1e-6)


def test_evaluation_is_that_of_each_clip_alone(digits):
    task = speech.build(Config(data=digits, clips=60, batch=6, characters=20, **SMALL))
    task.model.eval()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    found = task.evaluate("test", lambda: None)
    part, wanted, given = task.clips.test, [], []
    for i in range(len(part)):
        wanted.append(characters(part.texts[i]))
        given += spelled(task.config, task.model, *side_by_side(task.config, [part[i]]))
    similar = [damerau([START, *t[:20], END], [START, *g, *([END] * (len(g) < 20))])
               for t, g in zip(wanted, given, strict=True)]  # fmt: skip
    assert found["damerau"] == pytest.approx(sum(similar) / len(similar))
    assert found["character_error"] == pytest.approx(error_rate(wanted, given))
    alone = measures(part.texts, given, 20)
    assert {name: found[name] for name in alone} == pytest.approx(alone)
    losses = [task.loss(task.model, task.rows(part, [i]), {})[0].item() for i in range(len(part))]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.keys() == {"character_error", "word_error", "jaccard", "cosine", "damerau", "loss"}
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


def test_error_rates_see_the_whole_text_and_similarities_the_published_one():
    """Worked out by hand."""
    found = measures(["ab cd; e", "x"], [characters("ab cd"), characters("x")], 5)
    assert found["character_error"] == pytest.approx(3 / 9)  # "; e" is missing
    assert found["word_error"] == pytest.approx(2 / 4)  # "cd;" is "cd", and "e" is missing
    # Cut to 5 characters the first text is the same, but for the end that it did not come to: 6 of 7.
    assert found["damerau"] == pytest.approx((6 / 7 + 1) / 2)
    assert found["jaccard"] == pytest.approx((6 / 7 + 1) / 2)
    assert found["cosine"] == pytest.approx((6 / math.sqrt(42) + 1) / 2)


def test_another_seed_is_another_order(digits):
    orders = [speech.build(Config(data=digits, clips=60, batch=6, seed=seed, **SMALL))._ordered(0) for seed in (0, 1)]
    assert not torch.equal(*orders)


def test_what_is_cut_is_counted(digits):
    task = speech.build(Config(data=digits, clips=60, batch=6, frames=40, characters=20, **SMALL))
    about, parts = task.about()["data"], (task.clips.train, task.clips.valid, task.clips.test)
    lengths = torch.cat([part.lengths for part in parts])
    assert about["cut_clips"] == (lengths > 40).sum() > 0
    assert about["cut_texts"] == sum(len(text) > 20 for part in parts for text in part.texts) > 0
    learned = [n for n, text in zip(task.clips.train.lengths.tolist(), task.clips.train.texts, strict=True)
               if n <= 40 and len(text) <= 20]  # fmt: skip
    assert about["longest"] == max(learned)


def test_the_published_preset_is_what_was_published():
    wanted = dict(
        seed=42, epochs=15, batch=64, optimizer="adamw", weight_decay=0.01, lr=0.001, schedule="epochs", warmup=0,
        clip=None, weights="last", resample=False, dropout=0.0, smoothing=0.1, characters=97, frames=2754, masks=False,
        width=200, heads=2, blocks=2, method="exact",
    )  # fmt: skip
    config = config_from(speech.EXPERIMENT, read(presets("speech")["published"]), "published")
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_the_published_set_up_pads_all_and_hides_nothing(digits):
    published = read(presets("speech")["published"])
    config = config_from(speech.EXPERIMENT, published | SMALL | {"data": digits, "clips": 36, "batch": 4}, "published")
    task = speech.build(config)
    frames, lengths, tokens = task.batch(0, 0)
    assert frames.shape == (4, 2754, 80)
    assert lengths.tolist() == [2754] * 4
    assert tokens.shape == (4, 99)
    sizes = task.clips.train.lengths[task._ordered(0)].float()
    assert sizes.view(-1, 4).std(1).mean() > 0.5 * sizes.std()  # not sorted by length
    task.model.eval()
    logits = task.model(frames, lengths, tokens[:, :-1])
    wanted = F.cross_entropy(logits.mT, tokens[:, 1:], label_smoothing=0.1)
    assert torch.allclose(task.loss(task.model, (frames, lengths, tokens), {})[0], wanted)


def test_the_published_rates_go_by_epochs():
    settings = Config(epochs=15, lr=1e-3, schedule="epochs", warmup=0)
    rates = [rate(settings, Progress(epoch=epoch, step=10 * epoch), 150) for epoch in range(15)]
    assert rates[:3] == pytest.approx([1e-5, 5.05e-4, 1e-3])
    assert np.diff(rates[2:]) == pytest.approx([-(1e-3 - 1e-5) / 12] * 12)
    assert rates[-1] == pytest.approx(1e-5)
    assert rate(settings, Progress(epoch=15, step=150), 150) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(width=9), "width: expected an even number >= 4 that --heads 2 divides, got 9"),
        (dict(width=2), "width: expected an even number >= 4"),
        (dict(heads=3), "width: expected an even number"),
        (dict(schedule="epochs"), "warmup: expected no value with --schedule epochs, got 100"),
        (dict(schedule="epochs", warmup=0, steps=9), "steps: expected no value with --schedule epochs, got 9"),
        (dict(schedule="epochs", warmup=0, epochs=3), "epochs: expected at least 4 with --schedule epochs"),
        (dict(clips=0), "clips: expected a positive integer, got 0"),
        (dict(frames=1), "frames: expected an integer >= 2, got 1"),
        (dict(dropout=1.0), r"dropout: expected a number in \[0, 1\)"),
        (dict(method="nothing"), "method"),
        (dict(decoder_method="taylor:40"), "method"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        Config(**changes)


def test_a_batch_larger_than_the_data_is_refused(digits):
    with pytest.raises(UsageError, match="batch: expected at most 30, the number of training clips"):
        speech.build(Config(data=digits, clips=36, batch=31, **SMALL))


# --- Commands -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_figures_and_pictures(speech_run, capfd):
    for name in ("curves", "similarities", "losses", "looks"):
        assert (speech_run / f"{name}.svg").read_bytes().startswith(b"<?xml")
    result = json.loads((speech_run / RESULT).read_text())
    assert 0 <= result["test"]["damerau"] <= 1
    looks = json.loads((speech_run / "looks.json").read_text())["clips"]
    assert len(looks) == 3
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for clip in looks for row in clip["weights"])
    about = Run.open(speech_run).about()["data"]
    assert about["skipped"] == about["unknown_characters"] == 0
    assert about["cut_texts"] > 0  # at 20 characters
    assert main(["evaluate", str(speech_run)]) == 0
    assert f"damerau {result['test']['damerau']:.4g}" in capfd.readouterr().out
    assert main(["report", str(speech_run), "--out", str(speech_run / "page.html")]) == 0
    page = (speech_run / "page.html").read_text()
    assert "LSTM decoder" in page  # the published figures
    assert "data:image/png" in page  # the maps,
    assert "img-src data:" in page  # which a browser shows only if it may


@pytest.mark.parametrize(
    "content", ['{"clips": [1]}', '{"clips": []}', '{"clips": [{"given": "a", "weights": [[1]]}]}']
)
def test_records_that_are_not_maps_are_said(speech_run, content, capfd):
    (speech_run / "looks.json").write_text(content)
    reseal(speech_run)
    assert main(["report", str(speech_run), "--out", str(speech_run / "page.html")]) == 2
    assert "looks.json: expected" in capfd.readouterr().err


def test_options_without_effect_are_said(digits):
    with pytest.warns(UserWarning, match="--decoder-method taylor:2 has no effect"):
        speech.build(Config(data=digits, clips=36, batch=4, decoder="lstm", decoder_method="taylor:2", **SMALL))


def test_clips_that_are_left_out_are_counted_in_the_result(digits, tmp_path, capfd, recwarn):
    for index in (0, 10):
        (tmp_path / "digits" / f"3_ann_{index}.wav").write_bytes(b"")
    options = ["--data", digits, *SPEECH_OPTIONS, "--steps", "2", "--batch", "4"]
    assert main(["train", "speech", *options, "--out", str(tmp_path / "runs")]) == 0
    said = capfd.readouterr()
    skipped = json.loads((tmp_path / "runs" / "speech-001" / "skipped.json").read_text())["clips"]
    assert len(skipped) > 0
    assert all("3_ann_" in line and "is empty" in line for line in skipped)
    assert json.loads((tmp_path / "runs" / "speech-001" / RESULT).read_text())["skipped"] == len(skipped)
    assert f"skipped {len(skipped)} clips of the data" in said.out
    assert f"skipped {len(skipped)} of 60 clips of spoken digits, by index" in said.err


def test_both_decoders_are_compared(digits, tmp_path, capfd):
    options = ["--data", digits, *SPEECH_OPTIONS, "--steps", "3", "--out", str(tmp_path / "compared")]
    assert main(["compare", "speech", *options]) == 0
    out = capfd.readouterr().out
    assert "speech: character error, lower is better\nvariant " in out
    for decoder in ("lstm", "attention"):
        assert re.search(rf"^{decoder}, test: word-error [\d.]+, jaccard [\d.]+, cosine", out, re.MULTILINE)
    assert {folder.name for folder in (tmp_path / "compared").iterdir() if folder.is_dir()} == {"lstm", "attention"}


def test_compare_refuses_the_decoder_that_it_would_ignore(digits, tmp_path, complaint):
    options = ["--data", digits, *SPEECH_OPTIONS, "--steps", "3", "--out", str(tmp_path / "compared")]
    said = complaint(["compare", "speech", *options, "--decoder", "attention"])
    assert "--decoder: compare sets it for each variant; expected none" in said
    assert not (tmp_path / "compared").exists()


def test_maps_of_long_texts_have_words_beside_them():
    assert speech.row_names("ab c") == {0: "a", 1: "b", 2: " ", 3: "c", 4: "end"}
    text = "four hundred " * 10
    rows = speech.row_names(text)
    assert rows == {13 * i: "four" for i in range(10)} | {13 * i + 5: "hundred" for i in range(10)} | {130: "end"}
    assert list(speech.row_names("s" * 200).values()) == ["s" * 12, "end"]


def test_maps_have_a_scale_and_names_for_their_axes(speech_run):
    picture = speech.looks_picture(Run(speech_run), Config()).decode()
    for label in ("output", "seconds", "attention weight"):
        assert f"<!-- {label} -->" in picture


def test_pictures_before_the_first_evaluation_warn_of_nothing(speech_run, recwarn, monkeypatch):
    monkeypatch.setattr(Run, "metrics", lambda _: [{"step": 1, "epoch": 0.5}])
    run = Run(speech_run)
    for draw in (speech.similarities_picture, speech.losses_picture):
        assert draw(run).startswith(b"<?xml")
    assert curves(run, speech.EXPERIMENT).startswith(b"<?xml")
    assert [str(warning.message) for warning in recwarn] == []
