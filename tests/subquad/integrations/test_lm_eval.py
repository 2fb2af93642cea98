"""The model type of lm-evaluation-harness: the likelihoods are those of the model with its method."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

try:
    version("transformers")
    version("lm_eval")
except PackageNotFoundError as missing:
    pytest.skip(f"{missing}; lm_eval is too large for the dev extra", allow_module_level=True)

import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

import subquad.integrations.lm_eval  # noqa: F401  (it registers the model type)
from subquad import Exact, Taylor
from subquad.integrations.transformers import replace_attention
from tiny_models import WORDS, tiny

CONTEXT, CONTINUATION = [5, 6, 7, 8, 9, 10], [11, 12]


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{i}": i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")
    fast.save_pretrained(tmp_path)
    tiny("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def text(tokens):
    return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize(("method", "layers"), [("exact", None), ("taylor", None), ("taylor", "1"), ("taylor", "0+1")])
def test_likelihoods_are_those_of_the_replaced_model(folder, method, layers):
    kind = get_model("subquad")
    lm = kind(pretrained=folder, method=method, layers=layers, device="cpu", batch_size=1)
    chosen = [row.method for row in lm.report.layers]
    value = Exact() if method == "exact" else Taylor(2)
    assert chosen == ([None, value] if layers == "1" else [value, value])
    request = Instance("loglikelihood", {}, (text(CONTEXT), " " + text(CONTINUATION)), 0)
    found = lm.loglikelihood([request], disable_tqdm=True)[0][0]
    model = tiny("llama")
    replace_attention(model, method, layers=None if layers in (None, "0+1") else [1])
    with torch.no_grad():
        logits = model(torch.tensor([CONTEXT + CONTINUATION])).logits[0].log_softmax(-1)
    positions = range(len(CONTEXT) - 1, len(CONTEXT) + len(CONTINUATION) - 1)
    expected = sum(float(logits[i, (CONTEXT + CONTINUATION)[i + 1]]) for i in positions)
    assert found == pytest.approx(expected, abs=1e-4)


def test_the_module_is_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "subquad.integrations.lm_eval", "--help"], capture_output=True, text=True, check=True
    )
    assert "lm-eval" in found.stdout or "lm_eval" in found.stdout
