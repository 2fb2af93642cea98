"""Speech to characters: is an LSTM or an attention decoder more accurate, and can the encoder be linear?

    loss = mean over clips of the mean of -log p(character | audio, previous characters), with label smoothing

A batch holds clips of similar length to limit padding. Padding is masked in every layer and in the loss, except in the
published setup, which pads all clips to one length and masks nothing.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.data.clips import Clips, Part
from subquad_lab.data.sound import MELS
from subquad_lab.data.speech import ALPHABET, END, PAD, START, UNKNOWN, characters, load_speech, text_of
from subquad_lab.data.utterances import usual
from subquad_lab.figures.plots import axes_of, by_epoch, epochs_across, loss_label, plain, svg
from subquad_lab.figures.similarity import cosine, damerau, error_rate, jaccard
from subquad_lab.models import parameters
from subquad_lab.models.speech import AttentionDecoder, Encoder, LSTMDecoder, Speech, spell
from subquad_lab.options.methods import parse_method, refuse_many_features
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import Run

SIMILARITIES = {"jaccard": jaccard, "cosine": cosine, "damerau": damerau}
SORTED_BATCHES = 16  # that are sorted by length together
EVALUATION_CLIPS = 32  # per forward pass
SHOWN_CLIPS = 3  # whose attention is plotted
MAX_LABEL_CHARACTERS, MAX_LABEL_WORD = 60, 12  # next to an attention plot
LOOKS = "looks"
FRAME_SECONDS = 0.02  # between two frames of the encoder

PUBLISHED = [
    {"what": f"{decoder} decoder: damerau {d}, jaccard {j}, cosine {c}, loss {loss}", "data": "LJSpeech", "figure": ""}
    for decoder, j, c, d, loss in (("LSTM", 0.715, 0.832, 0.509, 1.183), ("attention", 0.764, 0.865, 0.632, 1.161))
]


@dataclass(frozen=True)
class Config(Training):
    """Train a network that transcribes speech.

    Args:
        batch: Total batch size of all processes.
        data: Folder with metadata.csv and wavs/ (LJSpeech), or with spoken digits. Default: synthesized spoken numbers
            (needs the extra `speech`).
        split: How spoken digits are split into training, validation and test set: by index or by speaker.
        clips: Number of clips to use. Default: 2,400 for spoken numbers and digits; all lines of metadata.csv.
        resample: Resample to 16 kHz. If false, samples are treated as 16 kHz whatever their rate.
        decoder: lstm or attention.
        method: Attention method of the encoder: exact, taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable.
        decoder_method: Method of the self-attention of the attention decoder.
        width: Hidden size.
        heads: Number of attention heads.
        blocks: Number of encoder blocks.
        dropout: Dropout probability.
        smoothing: Label smoothing.
        characters: Maximum number of characters per text; longer texts are cut.
        frames: Pad or cut all clips to this many frames. Default: pad to the longest clip of the batch.
        masks: Mask padding in audio and text.
    """

    epochs: int = 25
    batch: int = 16
    lr: float = 1e-3
    schedule: Literal["constant", "linear", "cosine", "epochs"] = "cosine"
    warmup: int = 100
    clip: float | None = 1.0
    data: str | None = None
    split: Literal["index", "speaker"] = "index"
    clips: int | None = None
    resample: bool = True
    decoder: Literal["lstm", "attention"] = "lstm"
    method: str = "exact"
    decoder_method: str = "exact"
    width: int = 200
    heads: int = 2
    blocks: int = 2
    dropout: float = 0.1
    smoothing: float = 0.1
    characters: int = 200
    frames: int | None = None
    masks: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clips", "width", "heads", "blocks", "characters"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if self.frames is not None and self.frames < 2:
            raise UsageError(f"frames: expected an integer >= 2, got {self.frames}")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a number in [0, 1), got {getattr(self, name)}")
        if self.width % self.heads or self.width % 2 or self.width < 4:
            raise UsageError(f"width: expected an even number >= 4 that --heads {self.heads} divides, got {self.width}")
        for method in (self.method, self.decoder_method):
            refuse_many_features(method, self.width // self.heads)


def make_model(config: Config) -> Speech:
    count, width, heads = len(ALPHABET) + 4, config.width, config.heads
    encoder = Encoder(MELS, width, heads, config.blocks, parse_method(config.method), config.dropout)
    if config.decoder == "lstm":
        return Speech(encoder, LSTMDecoder(count, width, heads, config.dropout))
    method = parse_method(config.decoder_method)
    return Speech(encoder, AttentionDecoder(count, width, heads, config.dropout, config.characters + 1, method))


class SpeechTask:
    """The task of the training loop: batches of clips of similar length."""

    def __init__(self, config: Config, clips: Clips) -> None:
        self.config, self.clips = config, clips
        self.model = make_model(config)
        if len(clips.train) < config.batch:
            raise UsageError(f"batch: expected at most {len(clips.train):,}, the number of training clips of "
                             f"{clips.name}, got {config.batch}")  # fmt: skip
        self.batches = -(-len(clips.train) // config.batch)
        self.order: tuple[int, Tensor] = (-1, torch.empty(0))  # of an epoch

    def about(self) -> dict[str, Any]:
        clips = self.clips
        sizes = {part: len(getattr(clips, part)) for part in ("train", "valid", "test")}
        texts = [characters(text) for part in (clips.train, clips.valid, clips.test) for text in part.texts]
        data = {
            "name": clips.name, "sha256": clips.checksum, "sizes": sizes, "skipped": len(clips.skipped),
            "unknown_characters": sum(text.count(UNKNOWN) for text in texts),
            "cut_texts": sum(len(text) > self.config.characters for text in texts),
            "cut_clips": sum(
                int((part.lengths > self._max_frames).sum()) for part in (clips.train, clips.valid, clips.test)
            ),
            "longest": self._longest(), "usual": usual(clips.train)._asdict(),
        }  # fmt: skip
        return {"data": data, "parameters": parameters(self.model)}

    @property
    def _max_frames(self) -> int:
        """Maximum number of frames of a clip; longer clips are cut."""
        return self.config.frames or 1 << 62

    def _longest(self) -> int:
        """Return the number of frames of the longest training clip whose audio and text are not cut, or 0."""
        part = self.clips.train
        whole = [int(n) for n, text in zip(part.lengths, part.texts, strict=True)
                 if n <= self._max_frames and len(text) <= self.config.characters]  # fmt: skip
        return max(whole, default=0)

    def batch(self, epoch: int, index: int) -> Rows:
        if self.order[0] != epoch:
            self.order = epoch, self._ordered(epoch)
        size = self.config.batch
        return self.rows(self.clips.train, self.order[1][index * size : (index + 1) * size].tolist())

    def _ordered(self, epoch: int) -> Tensor:
        """Return a random order, sorted by length within groups of batches, with the batches shuffled."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        size, lengths = self.config.batch, self.clips.train.lengths
        order = torch.randperm(len(lengths), generator=generator)
        order = torch.cat([order, order[: self.batches * size - len(order)]])
        if not self.config.masks:
            return order  # All clips are padded to the same length.
        groups = [group[lengths[group].argsort(stable=True)] for group in order.split(SORTED_BATCHES * size)]
        return torch.cat(groups).view(self.batches, size)[torch.randperm(self.batches, generator=generator)].flatten()

    def rows(self, part: Part, chosen: list[int]) -> Rows:
        """Return frames (b, t, 80), their valid lengths (b), and characters with start and end (b, n)."""
        config = self.config
        texts = [[START, *characters(part.texts[i])[: config.characters], END] for i in chosen]
        longest = max(map(len, texts)) if config.masks else config.characters + 2
        tokens = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
        return *side_by_side(config, [part[i] for i in chosen]), tokens

    def begin(self, rows: int) -> Carry:
        return {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        return self._losses(model, rows).mean(), {}

    def _losses(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the loss of each clip, averaged over its characters."""
        frames, lengths, tokens = rows
        logits, wanted = model(frames, lengths, tokens[:, :-1]), tokens[:, 1:]
        each = F.cross_entropy(logits.mT, wanted, reduction="none", label_smoothing=self.config.smoothing)
        if not self.config.masks:
            return each.mean(1)
        counts = wanted != PAD
        return (each * counts).sum(1) / counts.sum(1)

    def count(self, rows: Rows) -> int:
        return len(rows[0])

    @torch.no_grad()
    def evaluate(self, which: PartName, check: Callable[[], None]) -> dict[str, float]:
        """Return the loss, error rates and similarities with greedy decoding."""
        part = getattr(self.clips, which)
        losses, given = [], []
        device = next(self.model.parameters()).device
        order = part.lengths.argsort(stable=True).tolist()
        for begin in range(0, len(order), EVALUATION_CLIPS):
            check()
            rows = tuple(x.to(device) for x in self.rows(part, order[begin : begin + EVALUATION_CLIPS]))
            losses.append(self._losses(self.model, rows).double().cpu())
            given += spelled(self.config, self.model, rows[0], rows[1])
        found = measures([part.texts[i] for i in order], given, self.config.characters)
        return {**found, "loss": float(torch.cat(losses).mean())}

    def records(self) -> dict[str, Any]:
        """Return transcripts and attention maps of the first test clips, and the skipped clips."""
        self.model.eval()
        part, device = self.clips.test, next(self.model.parameters()).device
        looks = []
        for i in range(min(SHOWN_CLIPS, len(part))):
            frames, lengths, _ = (x.to(device) for x in self.rows(part, [i]))
            (given,) = spelled(self.config, self.model, frames, lengths)
            weights = self.model.look(frames, lengths, torch.tensor([[START, *given]], device=device))
            looks.append(
                {"wanted": part.texts[i], "given": text_of(given), "weights": weights[0].mean(0).cpu().tolist()}
            )
        return {LOOKS: {"clips": looks}, "skipped": {"clips": self.clips.skipped}}


def side_by_side(config: Config, clips: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad clips to frames (b, t, 80), and return them with their valid lengths (b)."""
    clips = [clip[: config.frames] for clip in clips]
    frames = torch.zeros(len(clips), config.frames or max(map(len, clips)), MELS)
    for row, clip in zip(frames, clips, strict=True):
        row[: len(clip)] = clip
    lengths = [len(clip) if config.masks else frames.shape[1] for clip in clips]
    return frames, torch.tensor(lengths)


def spelled(config: Config, model: Speech, frames: Tensor, lengths: Tensor, beams: int = 1) -> list[list[int]]:
    device = next(model.parameters()).device
    limit = config.characters
    return spell(model, frames.to(device), lengths.to(device), START, END, [START, PAD], limit, beams)


def measures(texts: list[str], given: list[list[int]], limit: int) -> dict[str, float]:
    """Return error rates relative to the full texts, and similarities of texts cut to `limit`, with start and end.

    The similarities follow the published setup. An output that reaches the limit has no end token.
    """
    read = [text_of(numbers) for numbers in given]
    pairs = [([START, *characters(text)[:limit], END], [START, *numbers, *([END] if len(numbers) < limit else [])])
             for text, numbers in zip(texts, given, strict=True)]  # fmt: skip
    return {
        "character_error": error_rate([text.lower() for text in texts], read),
        "word_error": error_rate([text.lower().split() for text in texts], [text.split() for text in read]),
        **{name: sum(f(t, g) for t, g in pairs) / len(pairs) for name, f in SIMILARITIES.items()},
    }


def build(config: Config) -> SpeechTask:
    if config.decoder == "lstm" and config.decoder_method != Config.decoder_method:
        warnings.warn(f"--decoder-method {config.decoder_method} has no effect with --decoder lstm; use --decoder "
                      "attention", stacklevel=2)  # fmt: skip
    return SpeechTask(config, load_speech(config.data, config.split, config.clips, config.resample))


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    return f"{config.decoder} decoder, {config.method} encoder"


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    """Plot similarities and losses by epoch, and attention maps."""
    found = {"similarities": similarities_picture(run), "losses": losses_picture(run)}
    if run.has(f"{LOOKS}.json"):
        found[LOOKS] = looks_picture(run, config)
    return found


def similarities_picture(run: Run) -> bytes:
    figure, (axes,) = axes_of(1)
    for name in SIMILARITIES:
        points = by_epoch([run], name)[1]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
    axes.set(ylabel="validation similarity to the reference", ylim=(0, 1))
    epochs_across(axes)
    if axes.lines:
        axes.legend(fontsize="small")
    return svg(figure)


def losses_picture(run: Run) -> bytes:
    figure, (axes,) = axes_of(1)
    for points, name in zip(by_epoch([run], "loss"), ("training", "validation"), strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
    axes.set(ylabel=loss_label(EXPERIMENT))
    epochs_across(axes)
    if axes.lines:
        axes.legend(fontsize="small")
    return svg(figure)


def looks_picture(run: Run, config: Config) -> bytes:
    """Plot the attention map of each clip: characters by time, on a square-root color scale."""
    from matplotlib.colors import PowerNorm

    clips = run.read_json(f"{LOOKS}.json").get("clips")
    if not isinstance(clips, list) or not clips or not all(isinstance(clip, dict) for clip in clips):
        raise UsageError(f"{run.folder / LOOKS}.json: expected a list of clips")
    seconds = "seconds" if config.resample else "seconds, assuming 16 kHz"
    figure, all_axes = axes_of(len(clips), square=True)
    for clip in clips:
        weights, given = clip.get("weights"), clip.get("given")
        if not isinstance(given, str) or not is_table(weights) or len(weights) != len(given) + 1:
            raise UsageError(f"{run.folder / LOOKS}.json: expected weights for each character and the end")
    norm = PowerNorm(0.5, 0, max(x for clip in clips for row in clip["weights"] for x in row))
    for clip, axes in zip(clips, all_axes, strict=True):
        weights, names = clip["weights"], row_names(clip["given"])
        axes.grid(False)
        shown = axes.imshow(weights, aspect="auto", cmap="Blues", norm=norm,
                            extent=(0, len(weights[0]) * FRAME_SECONDS, len(weights), 0))  # fmt: skip
        axes.set_yticks([row + 0.5 for row in names], [plain(name) for name in names.values()], fontsize=7)
        axes.set(xlabel=seconds, ylabel="output")
    figure.colorbar(shown, ax=all_axes, label="attention weight")
    return svg(figure)


def row_names(given: str) -> dict[int, str]:
    """Return row labels: the characters of a text, or the words of a long text, and its end."""
    parts = r"." if len(given) < MAX_LABEL_CHARACTERS else r"\S+"
    return {found.start(): found[0][:MAX_LABEL_WORD] for found in re.finditer(parts, given)} | {len(given): "end"}


def is_table(values: Any) -> bool:
    """Return whether the values are rows of finite numbers of equal length."""
    return (isinstance(values, list) and all(isinstance(row, list) and row for row in values)
            and len({len(row) for row in values}) == 1
            and all(isinstance(x, int | float) and abs(x) < 1e300 for row in values for x in row))  # fmt: skip


def variants(config: Config) -> dict[str, Config]:
    """Return both decoders; everything else is equal."""
    return {decoder: replace(config, decoder=decoder) for decoder in ("lstm", "attention")}


EXPERIMENT = Experiment(
    name="speech",
    about=__doc__,
    config=Config,
    measure="character_error",
    higher_is_better=False,
    unit="clips",
    loss_unit="character",
    build=build,
    label=label,
    variants=variants,
    varied=("decoder",),
    pictures=pictures,
    published=PUBLISHED,
)
