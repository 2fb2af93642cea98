"""torch.compile of transformers models with replaced attention; Dynamo's capture, so the backend is "eager"."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from subquad import Linear, Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

from subquad.integrations.transformers import replace_attention, state_cache
from tiny_models import LENGTH, inputs, tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:Dynamo detected a call")]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_is_one_graph(name):
    """For any length, with padding and without; Llama creates a cache of keys in it."""
    model = tiny(name, num_hidden_layers=1)
    replace_attention(model, Taylor(2))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for side, length in ((None, LENGTH), ("left", LENGTH), ("left", LENGTH - 2)):
        given = {key: value[:, :length] for key, value in inputs(name, side).items()}
        assert (compiled(**given).logits - model(**given).logits).abs().max() < 1e-5


@torch.enable_grad()
def test_gradients_of_one_graph():
    model = tiny("llama", num_hidden_layers=1).train()
    given = inputs("llama", "left") | dict(use_cache=False)
    with replace_attention(model, Linear("elu")):
        gradients = []
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            call(**given).logits.sin().sum().backward()
            gradients.append({key: value.grad.clone() for key, value in model.named_parameters()})
    for key, value in gradients[0].items():
        assert (gradients[1][key] - value).norm() <= 1e-4 * value.norm() + 1e-6, key


def test_rules_that_cannot_be_traced_raise_or_break_the_graph():
    model, ids = tiny("mistral", num_hidden_layers=1), inputs("llama")["input_ids"]
    expected = model(ids).logits
    replace_attention(model, Taylor(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        torch.compile(model, fullgraph=True, backend="eager")(ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert (compiled(ids).logits - expected).abs().max() < 1e-5


def test_a_loop_with_states_is_that_of_the_model():
    """Steps read states, whose graph breaks."""
    model, ids = tiny("llama", num_hidden_layers=1), inputs("llama")["input_ids"]
    replace_attention(model, Taylor(2))
    compiled, cache = torch.compile(model, dynamic=True, backend="eager"), state_cache(model)
    whole = model(ids, use_cache=False).logits
    found = [compiled(ids[:, :6], past_key_values=cache).logits]
    found += [compiled(ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, LENGTH)]
    assert (torch.cat(found, 1) - whole).abs().max() < 1e-4
