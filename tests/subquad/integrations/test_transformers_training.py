"""Training transformers models with any method: gradients, gradient checkpointing, decreasing losses."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from subquad import Taylor

try:
    version("transformers")
except PackageNotFoundError:
    pytest.skip("transformers is not installed; pip install 'subquad[transformers]'", allow_module_level=True)

from subquad.integrations.transformers import replace_attention
from tiny_models import inputs, padding, real, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LINEAR = ["gpt2", "llama", "bert", "bart", "whisper"]
NAMES = [*LINEAR, "t5"]  # which adds a bias to its logits


def loss_of(model, name, side="left"):
    given = inputs(name, side)
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    return model(**given, labels=tokens.where(padding(side).bool(), -100)).loss


def gradients(model, name):
    model.zero_grad()
    loss_of(model, name).backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm() + 1e-6, key


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_exact_attention_are_those_of_the_model(name):
    model = tiny(name).train()
    own = gradients(model, name)
    with replace_attention(model, "exact"):
        assert_same(gradients(model, name), own)


@pytest.mark.parametrize(("name", "method"), [*((x, "exact") for x in NAMES), *((x, "taylor") for x in LINEAR)])
def test_gradient_checkpointing_does_not_change_gradients(name, method):
    model = tiny(name).train()
    with replace_attention(model, method):
        plain = gradients(model, name)
        model.gradient_checkpointing_enable()
        assert_same(gradients(model, name), plain)


@pytest.mark.parametrize("name", LINEAR)
def test_the_loss_decreases_in_training(name):
    model = tiny(name).train()
    with replace_attention(model, Taylor(2)):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            loss = loss_of(model, name)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_gradients_of_a_linear_method_agree_with_finite_differences():
    """Check one direction in the space of all parameters, in double precision, which the models' own losses leave."""
    model = tiny("gpt2").double()
    value = lambda: model(**inputs("gpt2", "left")).logits[real("left")].sin().sum()
    with replace_attention(model, Taylor(2)):
        value().backward()
        torch.manual_seed(0)
        direction = {key: torch.randn_like(parameter) for key, parameter in model.named_parameters()}
        slope = sum((parameter.grad * direction[key]).sum() for key, parameter in model.named_parameters())
        step, values = 1e-6, []
        with torch.no_grad():
            for size in (step, -2 * step):
                for key, parameter in model.named_parameters():
                    parameter += size * direction[key]
                values.append(value())
    assert ((values[0] - values[1]) / (2 * step) - slope).abs() < 1e-5 * slope.abs()


@pytest.mark.parametrize("method", ["hedgehog", "window:4+hedgehog"])
def test_a_learned_map_is_made_for_each_layer_and_is_part_of_the_model(method) -> None:
    sizes = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=8)
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes)).eval()
    names = list(model.state_dict())
    tokens = torch.randint(0, 9, (2, 12), generator=torch.Generator().manual_seed(0))
    report = replace_attention(model, method)
    own = {name: p for name, p in model.named_parameters() if "subquad_map" in name}
    assert len({id(p) for p in own.values()}) == len(own) == (4 if method == "hedgehog" else 6)
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(bool(p.grad.any()) for p in own.values())
    with torch.no_grad():
        whole = model.eval()(tokens).logits
        first = model(tokens[:, :7], use_cache=True)
        steps = [model(tokens[:, [t]], past_key_values=first.past_key_values).logits for t in range(7, 12)]
    torch.testing.assert_close(torch.cat([first.logits, *steps], 1), whole, rtol=0, atol=1e-5)
    report.undo()
    assert list(model.state_dict()) == names
