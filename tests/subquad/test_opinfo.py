"""Torch's own samples for its attention: with the default method, subquad gives what torch gives, gradients too."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from subquad import attention


def dropout_free_samples() -> list:
    (operator,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    with torch.random.fork_rng():  # They are drawn from the global generator.
        torch.manual_seed(0)
        samples = list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))
    return [sample for sample in samples if not sample.kwargs.get("dropout_p")]


SAMPLES = dropout_free_samples()


def with_gradients(function, sample) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of everything in the sample that wants one, a bias too."""
    arguments = (sample.input, sample.args, sample.kwargs)
    wanted = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    output = function(sample.input, *sample.args, **sample.kwargs)
    counts = torch.arange(output.numel()).reshape(output.shape).add(1).sin()
    return output, list(torch.autograd.grad(output, wanted, counts))


def test_there_are_as_many_samples_as_expected():
    """Fewer would mean that the tests below compare less than they seem to."""
    assert len(SAMPLES) == 13


def attention_with_state(*arguments, **options) -> Tensor:
    """The same by the blocks of rows and masks of `Exact`, where a plain call is torch's own."""
    return attention(*arguments, **options, return_state=True)[0]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
# Logits go up to hundreds in these samples, so that another kernel of torch's rounds to other digits.
@pytest.mark.parametrize(("ours", "tolerance"), [(attention, 0.0), (attention_with_state, 1e-4)])
def test_sample_has_the_output_and_gradients_of_torch(number, ours, tolerance):
    expected = with_gradients(F.scaled_dot_product_attention, SAMPLES[number])
    torch.testing.assert_close(with_gradients(ours, SAMPLES[number]), expected, rtol=tolerance, atol=tolerance)
