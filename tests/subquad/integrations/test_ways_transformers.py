"""Usual ways to use a Hugging Face model, for twelve kinds of models after `replace_attention`.

    forward, backward, generate, pipeline, Trainer, save and load

Exact attention must give what the model gave. Where the answer of Taylor is not known in advance, the ways must agree
with each other: generation with full forwards, a loaded model with the saved one.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from subquad import Exact, Taylor
from subquad.methods.window import Window

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

import transformers

from subquad.integrations.transformers import replace_attention
from tiny_models import MODELS, WORDS, inputs, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
DECODERS = ["gpt2", "llama", "mistral", "qwen2", "gemma2", "gemma3", "phi3"]
ENCODER_DECODERS = ["t5", "bart", "whisper"]
NAMES = [*DECODERS, "bert", *ENCODER_DECODERS, "vit"]
METHODS = {"exact": Exact(), "taylor": Taylor(2)}
TASKS = dict.fromkeys(DECODERS, "text-generation") | dict(bert="fill-mask")
every_way = pytest.mark.parametrize("method", METHODS)
every_model = pytest.mark.parametrize("name", NAMES)
# What the report must show for Taylor: the layers that it cannot serve.
SERVED = dict(
    mistral={Window(8)}, phi3={Window(8)}, qwen2={Window(8), Taylor(2)}, gemma3={Window(8), Taylor(2)},
    gemma2={Window(8, softcap=2.0), Window(None, softcap=2.0)}, t5={Exact()},
)  # fmt: skip


def given(name):
    """Return the inputs of a model, with labels."""
    if name == "vit":
        generator = torch.Generator().manual_seed(0)
        return dict(pixel_values=torch.randn(3, 3, 12, 12, generator=generator), labels=torch.tensor([0, 1, 2]))
    found = inputs(name if name in ("bert", *ENCODER_DECODERS) else "llama")
    return found | dict(labels=found.get("decoder_input_ids", found.get("input_ids")))


def eager(name, **changes):
    model = tiny(name, **changes)
    model.set_attn_implementation("eager")
    return model


@every_way
@every_model
def test_forward_and_backward(name, method):
    model = eager(name).train()
    own = model(**given(name))
    own.loss.backward()
    before = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    report = replace_attention(model, METHODS[method])
    found = model(**given(name))
    found.loss.backward()
    after = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert after.keys() == before.keys() and all(value.isfinite().all() for value in after.values())
    assert found.logits.isfinite().all()
    if method == "taylor":
        assert {layer.method for layer in report.layers} == SERVED.get(name, {Taylor(2)})
    if method == "exact" or name in ("t5", "mistral", "phi3", "gemma2"):  # all of whose layers are served exactly
        assert (found.logits - own.logits).abs().max() < 1e-5
        for key, value in before.items():
            assert (after[key] - value).norm() <= 1e-4 * value.norm() + 1e-6, key
    else:
        assert (found.logits - own.logits).abs().max() > 0.01  # The method is not exact attention.


@every_way
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_generation_is_a_loop_of_full_forwards(name, method):
    model = eager(name)
    prompt = {key: value for key, value in given(name).items() if key in ("input_ids", "input_features")}
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    own = model.generate(**prompt, **options)
    replace_attention(model, METHODS[method])
    found = model.generate(**prompt, **options)
    if method == "exact":
        assert found.tolist() == own.tolist()
    key = "decoder_input_ids" if name in ENCODER_DECODERS else "input_ids"
    # Whisper does not return the token that starts the decoder.
    tokens = torch.full((3, 1), 3) if name == "whisper" else found[:, : found.shape[1] - 6]
    for _ in range(6):
        with torch.no_grad():
            logits = model(**prompt | {key: tokens}, use_cache=False).logits[:, -1]
        logits[:, 2] = -torch.inf  # min_new_tokens forbids the end
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert found.tolist() == tokens[:, tokens.shape[1] - found.shape[1] :].tolist()


def words(padding_side):
    """Return a tokenizer whose words are w3, w4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2}
    tokenizer = Tokenizer(models.WordLevel(special | {f"w{i}": i for i in range(3, WORDS)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", mask_token="w39",
        padding_side=padding_side,
    )  # fmt: skip


@every_way
@pytest.mark.parametrize("name", TASKS)
def test_pipelines(name, method):
    texts = ["w5 w6 w7 w39 w5 w6 w7 w8 w9", "w8 w9 w10 w11 w12 w13 w14 w15 w39 w6 w30 w31 w32"]  # longer than windows
    model, tokenizer = tiny(name), words("left" if name in DECODERS else "right")
    options = dict(batch_size=2) | (dict(max_new_tokens=4, do_sample=False) if name in DECODERS else {})
    pipeline = transformers.pipeline(TASKS[name], model=model, tokenizer=tokenizer, device="cpu")
    own = pipeline(texts, **options)
    with replace_attention(model, METHODS[method]):
        found = pipeline(texts, **options)
        alone = [pipeline(text, **options | dict(batch_size=1)) for text in texts]
    key = "generated_text" if name in DECODERS else "token_str"
    shown = lambda results: [[one[key] for one in result] for result in results]
    assert shown(found) == shown(alone)
    if method == "exact":
        assert shown(found) == shown(own)


@every_way
@every_model
def test_a_step_of_the_trainer(name, method, tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    rows = [{key: value[row] for key, value in given(name).items()} for row in range(3)]
    options = dict(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=3, report_to=[], use_cpu=True,
                   remove_unused_columns=False, disable_tqdm=True, save_strategy="no", seed=0)  # fmt: skip
    losses = []
    for change in (False, True):
        model = eager(name)
        if change:
            replace_attention(model, METHODS[method])
        before = {key: value.clone() for key, value in model.named_parameters()}
        arguments = transformers.TrainingArguments(**options)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        losses.append(trainer.train().training_loss)
        assert any(not torch.equal(before[key], value) for key, value in model.named_parameters())
    if method == "exact":
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] < float("inf")


@every_way
@every_model
def test_save_and_load(name, method, tmp_path):
    model = tiny(name)
    replace_attention(model, METHODS[method])
    model.save_pretrained(tmp_path)
    loaded = MODELS[name][0].from_pretrained(tmp_path).eval()
    replace_attention(loaded, METHODS[method])
    with torch.no_grad():
        assert torch.equal(loaded(**given(name)).logits, model(**given(name)).logits)
    assert loaded.config.model_type == model.config.model_type
