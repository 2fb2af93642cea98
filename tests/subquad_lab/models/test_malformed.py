"""Malformed models: GGUF and safetensors headers that lie, and folders of transformers with wrong files.

Each is one line and exit code 2, whatever the libraries that parse it would have done.
"""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad_lab.cli import main
from subquad_lab.models.gguf_header import check_gguf

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed: the extra `pretrained` brings it", allow_module_level=True)

LONG = 2**63


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text that it can read."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=56, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    transformers.AutoModel.from_config(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i + 1 for i in range(50)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
    made.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("w1 w2 " * 100)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def refused(model: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Plan for a model, and return the one line of its refusal."""
    begin = time.monotonic()
    assert main(["plan", "--model", str(model), "--text", str(text)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("subquad: error: --model: ") and err.count("\n") == 1, err
    assert len(err) < 2100 and time.monotonic() - begin < 20
    return err


def set_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int(share * (folder / name).stat().st_size))


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the JSON header of the weights."""

    def apply(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + length])
        change(head)
        text = json.dumps(head).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return apply


def pipe(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace


def folder_for(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


WEIGHTS, NORM = "model.safetensors", "norm.weight"
FOLDERS: dict[str, Callable[[Path], None]] = {
    "config is empty": put("config.json", b""),
    "config is not JSON": put("config.json", b"{"),
    "config is a list": put("config.json", b"[]"),
    "config is not UTF-8": put("config.json", b'{"a": "\xff\xfe"}'),
    "config is nested": put("config.json", b'{"a":' + b"[" * 100_000),
    "config is missing": lambda folder: (folder / "config.json").unlink(),
    "config is a pipe": pipe("config.json"),
    "config is a folder": folder_for("config.json"),
    "no model type": put("config.json", b"{}"),
    "model type is a number": set_json("config.json", model_type=5),
    "model type is unknown": set_json("config.json", model_type="nothing"),
    "remote code": set_json("config.json", model_type="x", auto_map={"AutoConfig": "evil.py--Evil"}),
    "layers are endless": set_json("config.json", num_hidden_layers=10**9),
    "layers are negative": set_json("config.json", num_hidden_layers=-1),
    "layers are a text": set_json("config.json", num_hidden_layers="two"),
    "layers are null": set_json("config.json", num_hidden_layers=None),
    "layers are one more": set_json("config.json", num_hidden_layers=3),
    "width is huge": set_json("config.json", hidden_size=10**9, head_dim=8),
    "width is 0": set_json("config.json", hidden_size=0),
    "width is another": set_json("config.json", hidden_size=64),
    "width is not a number": set_json("config.json", hidden_size=float("nan")),
    "heads are 0": set_json("config.json", num_attention_heads=0, head_dim=None),
    "heads are negative": set_json("config.json", num_attention_heads=-4),
    "heads do not divide": set_json("config.json", num_attention_heads=5, head_dim=None),
    "vocabulary is huge": set_json("config.json", vocab_size=2**62),
    "vocabulary is a list": set_json("config.json", vocab_size=[1]),
    "rope is a number": set_json("config.json", rope_parameters=3),
    "activation is unknown": set_json("config.json", hidden_act="nothing"),
    "dtype is unknown": set_json("config.json", dtype="float7"),
    "weights are empty": put(WEIGHTS, b""),
    "weights are short": put(WEIGHTS, b"abc"),
    "weights are noise": put(WEIGHTS, bytes(range(256)) * 8),
    "weights are a pickle": put(WEIGHTS, b"\x80\x02}q\x00."),
    "weights are cut in the header": cut(WEIGHTS, 0.01),
    "weights are cut in the middle": cut(WEIGHTS, 0.5),
    "weights are cut at the end": cut(WEIGHTS, 0.999),
    "weights are missing": lambda folder: (folder / WEIGHTS).unlink(),
    "weights are a pipe": pipe(WEIGHTS),
    "weights are of a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin") and None,
    "header is too long": put(WEIGHTS, struct.pack("<Q", LONG) + b"{}"),
    "header is not JSON": put(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"),
    "header is a list": put(WEIGHTS, struct.pack("<Q", 2) + b"[]"),
    "header is nested": put(WEIGHTS, struct.pack("<Q", 50_000) + b"[" * 50_000),
    "tensor is missing": header(lambda head: head.pop(NORM)),
    "tensor overlaps": header(lambda head: head[NORM].update(data_offsets=[0, 128])),
    "tensor is outside": header(lambda head: head[NORM].update(data_offsets=[2**40, 2**40 + 128])),
    "tensor is reversed": header(lambda head: head[NORM].update(data_offsets=head[NORM]["data_offsets"][::-1])),
    "tensor is negative": header(lambda head: head[NORM].update(data_offsets=[-128, 0])),
    "tensor is of another shape": header(lambda head: head[NORM].update(shape=[16, 2])),
    "tensor is of a larger shape": header(lambda head: head[NORM].update(shape=[2**40])),
    "tensor is of no type": header(lambda head: head[NORM].update(dtype="Q7")),
    "tensor is a number": header(lambda head: head.update({NORM: 3})),
    "tokenizer is empty": put("tokenizer.json", b""),
    "tokenizer is not JSON": put("tokenizer.json", b"{"),
    "tokenizer is a list": put("tokenizer.json", b"[]"),
    "tokenizer has no parts": put("tokenizer.json", b"{}"),
    "tokenizer is nested": put("tokenizer.json", b'{"a":' + b"[" * 100_000),
    "tokenizer is of another kind": set_json("tokenizer.json", model={"type": "Nothing"}),
    "tokenizer has no vocabulary": set_json("tokenizer.json", model={"type": "WordLevel", "vocab": 5}),
    "tokenizer has broken merges": set_json("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": ["a b"]}),
    "tokenizer numbers are too large": set_json(
        "tokenizer.json", model={"type": "WordLevel", "vocab": {"?": 2**40}, "unk_token": "?"}
    ),
    "tokenizer has a broken expression": set_json(
        "tokenizer.json",
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    "tokenizer is missing": lambda folder: [(folder / name).unlink() for name in TOKENIZER] and None,
    "tokenizer settings are a list": put("tokenizer_config.json", b"[]"),
    "tokenizer is a pipe": pipe("tokenizer.json"),
    "index leads elsewhere": put("model.safetensors.index.json", b'{"weight_map": {"a": "../../x.safetensors"}}'),
    "index leads nowhere": put("model.safetensors.index.json", b'{"weight_map": {"a": "x.safetensors"}}'),
    "index is not one": put("model.safetensors.index.json", b'{"weight_map": [1]}'),
    "another file is a pipe": pipe("generation_config.json"),
}  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_malformed_folder_is_one_line(fault, copy, capfd):
    FOLDERS[fault](copy / "model")
    line = refused(copy / "model", copy / "text.txt", capfd)
    assert str(copy) in line


# --- GGUF ---------------------------------------------------------------------------------------------------------


def text_of(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def value(key: bytes, kind: int, content: bytes) -> bytes:
    return text_of(key) + struct.pack("<I", kind) + content


def tensor(name: bytes = b"t", sizes: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text_of(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


ARCHITECTURE = value(b"general.architecture", 8, text_of(b"llama"))
LISTED = value(b"tokens", 9, struct.pack("<IQ", 8, 2) + text_of(b"a") + text_of(b"b"))


def gguf(
    *values: bytes, tensors: tuple[bytes, ...] = (), data: int = 64, counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF", of_version: int = 3,
) -> bytes:  # fmt: skip
    """A GGUF file with counts of one's own choice."""
    both = counts or (len(tensors), len(values))
    head = magic + struct.pack("<IQQ", of_version, *both) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


ALIGNMENT = value(b"general.alignment", 4, struct.pack("<I", 32))
GOOD = gguf(ARCHITECTURE, LISTED, ALIGNMENT, tensors=(tensor(), tensor(b"u", offset=32)))
FILES = {
    "is empty": b"",
    "has another magic": gguf(magic=b"GGML"),
    "has only a magic": b"GGUF",
    "is of version 1": gguf(of_version=1),
    "is of version 77": gguf(of_version=77),
    "is big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "has endless values": gguf(ARCHITECTURE, counts=(0, LONG)),
    "has endless tensors": gguf(ARCHITECTURE, counts=(LONG, 1)),
    "has a value less": gguf(ARCHITECTURE, counts=(0, 2)),
    "has an endless key": gguf(text_of(b"", LONG)),
    "has a key that is not UTF-8": gguf(value(b"\xff\xfe", 4, bytes(4))),
    "has an endless text": gguf(value(b"k", 8, text_of(b"", LONG))),
    "has a text that is not UTF-8": gguf(value(b"k", 8, text_of(b"\xff"))),
    "has an unknown type": gguf(value(b"k", 13, bytes(8))),
    "has an endless list": gguf(value(b"k", 9, struct.pack("<IQ", 0, LONG))),
    "has an endless list of texts": gguf(value(b"k", 9, struct.pack("<IQ", 8, LONG))),
    "has a list of lists": gguf(value(b"k", 9, struct.pack("<IQ", 9, 1))),
    "has a list of an unknown type": gguf(value(b"k", 9, struct.pack("<IQ", 99, 1))),
    "has a key twice": gguf(ARCHITECTURE, ARCHITECTURE),
    "has an alignment of 0": gguf(value(b"general.alignment", 4, bytes(4))),
    "has a huge tensor": gguf(ARCHITECTURE, tensors=(tensor(sizes=(2**62, 2**62)),)),
    "has a tensor outside": gguf(ARCHITECTURE, tensors=(tensor(offset=2**50),)),
    "has tensors that overlap": gguf(ARCHITECTURE, tensors=(tensor(), tensor(b"u", offset=16))),
    "has a tensor of an unknown type": gguf(ARCHITECTURE, tensors=(tensor(kind=5),)),
    "has a tensor of half a block": gguf(ARCHITECTURE, tensors=(tensor(kind=2),)),
    "has a tensor of many sizes": gguf(ARCHITECTURE, tensors=(tensor(sizes=(1,) * 9),)),
    "has a tensor without a name": gguf(ARCHITECTURE, tensors=(text_of(b"", LONG),)),
    "has no data": gguf(ARCHITECTURE, tensors=(tensor(),), data=0),
    "is noise": bytes(range(256)) * 40,
    "is noise after its magic": b"GGUF" + bytes(range(256)) * 40,
    "is of another model": gguf(value(b"general.architecture", 8, text_of(b"nothing"))),
    "has no architecture": gguf(LISTED),
}


def test_the_gguf_file_of_these_tests_is_valid_without_a_lie(tmp_path):
    (tmp_path / "x.gguf").write_bytes(GOOD)
    assert check_gguf(tmp_path / "x.gguf") == 2


@pytest.mark.parametrize("fault", FILES)
def test_a_malformed_gguf_file_is_one_line(fault, tmp_path, whole, capfd):
    (tmp_path / "x.gguf").write_bytes(FILES[fault])
    assert "x.gguf" in refused(tmp_path / "x.gguf", whole / "text.txt", capfd)


@pytest.mark.parametrize("fault", [fault for fault in FILES if "model" not in fault and "architecture" not in fault])
def test_the_header_itself_is_refused_before_another_library_reads_it(fault, tmp_path):
    (tmp_path / "x.gguf").write_bytes(FILES[fault])
    with pytest.raises(ValueError, match=r"\w"):
        check_gguf(tmp_path / "x.gguf")


def test_every_cut_of_a_gguf_file_is_refused(tmp_path):
    """At all bytes of the header and of the tensors."""
    for end in range(len(GOOD)):
        (tmp_path / "x.gguf").write_bytes(GOOD[:end])
        with pytest.raises(ValueError, match=r"expected|does not begin|do not fit|outside the data"):
            check_gguf(tmp_path / "x.gguf")


def test_a_pipe_in_the_place_of_a_gguf_file_is_refused(tmp_path, whole, capfd):
    os.mkfifo(tmp_path / "x.gguf")
    assert "got a named pipe" in refused(tmp_path / "x.gguf", whole / "text.txt", capfd)
