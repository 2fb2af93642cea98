"""A conformance suite for feature maps, built-in or your own.

One call runs all checks:

    check_feature_map(MyMap(), width=8)

With pytest, inherit from the suite to run each check as a separate test:

    class TestMyMap(FeatureMapConformance):
        method = MyMap()

The reference forms all weights from the map alone, w_ij = phi(q_i).phi(k_j) exp(c_j), in float64. A map with parameters
is computed in their dtype: use float64 parameters, or a larger `tolerance`.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.features.alignment import aligned
from subquad.attention import quiet_attention
from subquad.methods import FeatureMap, MethodLike, feature_method, resolve
from subquad.methods.method import UserMap

__all__ = ["FeatureMapConformance", "attention_in_form", "check_feature_map"]


def check_feature_map(method: FeatureMap, width: int = 8, tolerance: float = 1e-9) -> None:
    """Run the conformance suite on a feature map.

    Args:
        method: The feature map.
        width: Width of its inputs (..., n, width).
        tolerance: Allowed deviation from the reference, relative to its largest number or 1.

    Raises:
        AssertionError: A check failed; the message names it.

    Example:
        >>> from subquad import Taylor
        >>> check_feature_map(Taylor(2), width=3)
    """
    suite = FeatureMapConformance()
    suite.method, suite.width, suite.tolerance = method, width, tolerance
    for name in dir(FeatureMapConformance):
        if name.startswith("test_"):
            getattr(suite, name)()


def attention_in_form(
    query: Tensor, key: Tensor, value: Tensor, *, method: MethodLike,
    form: Literal["dense", "linear", "chunked", "fused"], is_causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return `attention` computed in a form of your choice, to compare forms or to count what they do.

    Args:
        query: (..., heads, queries, width).
        key: (..., heads, keys, width).
        value: (..., heads, keys, value width).
        method: A method or its name. `Exact()` has a single form, whichever is named.
        form: "dense" forms all weights; "linear" and "chunked" (causal) keep sums; "fused" uses the native kernels.
        is_causal: As for `attention`.
        scale: As for `attention`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 32, 8).unbind()
        >>> dense, linear = (attention_in_form(q, k, v, method="taylor", form=form) for form in ("dense", "linear"))
        >>> torch.allclose(dense, linear, atol=1e-5)
        True
    """
    return run(resolve(method), Call.of(query, key, value, is_causal=is_causal, scale=scale), form).output


class FeatureMapConformance:
    """The checks, as a base class for tests: inherit under a name that begins with Test, and set `method`.

    Attributes:
        method: The feature map.
        width: Width of its inputs.
        tolerance: Allowed deviation from the reference, relative to its largest number or 1.
        dtype: Of the inputs.
        length: Number of tokens.
    """

    method: FeatureMap
    width: int = 8
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    length: int = 21

    def test_features_have_the_declared_size(self) -> None:
        features, log_scale = self._features(self._inputs()[1], is_query=False)
        lead = (2, self._heads, self.length)
        assert features.shape == (*lead, self.method.size(self.width)), tuple(features.shape)
        assert log_scale.shape == lead, tuple(log_scale.shape)
        assert bool(features.isfinite().all()), "features of finite inputs are not finite"

    def test_features_of_a_token_depend_only_on_that_token(self) -> None:
        _, k, _ = self._inputs()
        edited = k.clone()
        edited[:, :, 5] += 1
        for is_query in (False, True):
            for before, after in zip(self._features(k, is_query), self._features(edited, is_query), strict=True):
                assert torch.equal(before[:, :, :5], after[:, :, :5]), "features of a token changed with another token"
                assert torch.equal(before[:, :, 6:], after[:, :, 6:]), "features of a token changed with another token"

    def test_weights_are_positive_if_declared(self) -> None:
        q, k, v = self._inputs()
        if not self.method.positive:
            return
        assert bool((self._weights(q, k) >= 0).all()), "positive is True, but a weight is negative"
        output = quiet_attention(q, k, v, method=self.method)
        room = 1e-5 * (v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True))
        assert bool((output <= v.amax(-2, keepdim=True) + room).all()), "an output exceeds all values"
        assert bool((output >= v.amin(-2, keepdim=True) - room).all()), "an output lies below all values"

    def test_forms_agree_with_all_pairs_for_every_mask(self) -> None:
        q, k, v = self._inputs()
        keep = torch.arange(self.length).expand(2, -1) % 4 != 1
        segments = torch.arange(self.length).expand(2, -1) // 6
        for is_causal in (False, True):
            for padding in (None, keep):
                for packing in (None, segments):
                    expected = self._oracle(q, k, v, is_causal, padding, packing)
                    call = Call.of(q, k, v, is_causal=is_causal, key_padding_mask=padding, segment_ids=packing)
                    for form in ("dense", "chunked", "fused"):
                        output = run(self.method, call, form, chunk=4).output
                        self._close(output, expected, f"{form}, causal={is_causal}")

    def test_gradients_agree_with_all_pairs(self) -> None:
        q, k, v = (x.requires_grad_() for x in self._inputs())
        learned = tuple(self.method.parameters()) if isinstance(self.method, nn.Module) else ()
        for is_causal in (False, True):
            loss = self._oracle(q, k, v, is_causal, None, None).square().sum()
            expected = torch.autograd.grad(loss, (q, k, v, *learned), allow_unused=True, materialize_grads=True)
            loss = quiet_attention(q, k, v, is_causal=is_causal, method=self.method).square().sum()
            found = torch.autograd.grad(loss, (q, k, v, *learned), allow_unused=True, materialize_grads=True)
            for a, b in zip(found, expected, strict=True):
                self._close(a, b, f"gradient, causal={is_causal}")

    def test_resuming_from_a_state_continues_the_sequence(self) -> None:
        q, k, v = self._inputs()
        whole = quiet_attention(q, k, v, is_causal=True, method=self.method)
        state, outputs = None, []
        for part in torch.arange(self.length).split([9, 1, 1, self.length - 11]):
            q_p, k_p, v_p = (x[:, :, part] for x in (q, k, v))
            output, state = quiet_attention(
                q_p, k_p, v_p, is_causal=True, method=self.method, state=state, return_state=True
            )
            outputs.append(output)
        self._close(torch.cat(outputs, 2), whole, "resumed")

    def test_the_future_does_not_affect_the_past(self) -> None:
        q, k, v = self._inputs()
        past = quiet_attention(q, k, v, is_causal=True, method=self.method)[:, :, :9]
        for edit in (1e3, float("nan"), float("inf")):
            q_e, k_e, v_e = (x.index_fill(2, torch.arange(9, self.length), edit) for x in (q, k, v))
            after = quiet_attention(q_e, k_e, v_e, is_causal=True, method=self.method)[:, :, :9]
            assert torch.equal(past, after), f"the past changed when the future became {edit}"

    def test_padding_does_not_affect_results(self) -> None:
        q, k, v = self._inputs()
        keep = torch.arange(self.length) < 15
        expected = quiet_attention(q, k[:, :, :15], v[:, :, :15], method=self.method)
        spoiled_k, spoiled_v = (x.clone().index_fill_(2, torch.arange(15, self.length), float("nan")) for x in (k, v))
        spoiled_k.requires_grad_()
        output = quiet_attention(q, spoiled_k, spoiled_v, method=self.method, key_padding_mask=keep)
        self._close(output, expected, "padded")
        output.sum().backward()
        assert spoiled_k.grad is not None and not spoiled_k.grad[:, :, 15:].any(), "a hidden key has a gradient"
        nothing = quiet_attention(q, k, v, method=self.method, key_padding_mask=torch.zeros_like(keep))
        assert not nothing.any(), "a row that sees no key is not 0"

    def test_half_precision_is_computed_in_float32(self) -> None:
        if isinstance(self.method, nn.Module):
            return  # The dtype of its parameters decides.
        q, k, v = (x.half() for x in self._inputs())
        output = quiet_attention(q, k, v, is_causal=True, method=self.method)
        wide = quiet_attention(q.float(), k.float(), v.float(), is_causal=True, method=self.method)
        assert output.dtype == torch.float16
        assert torch.equal(output, wide.to(torch.float16)), "the computation was not in float32"

    @property
    def _heads(self) -> int:
        """Heads of the inputs: those that the map has parameters for."""
        heads: int = getattr(self.method, "heads", 3)
        return heads

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        lead, widths = (2, self._heads, self.length), (self.width, self.width, 5)
        q, k, v = (torch.randn(*lead, width, generator=generator) for width in widths)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def _features(self, x: Tensor, is_query: bool) -> tuple[Tensor, Tensor]:
        features, log_scale = UserMap(self.method).mapped(x, is_query=is_query)
        return features, torch.zeros_like(features[..., 0]) if log_scale is None else log_scale

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        call, root = Call.of(q, k, k), self.width**-0.25  # square root of the default scale, for q and k each
        q, k = aligned(feature_method(self.method), call)
        q, k = call.layout.unfold_query(q) * root, call.layout.unfold(k) * root
        a, _ = self._features(q, is_query=True)
        c, log_scale = self._features(k[..., : self.width], is_query=False)
        return a @ c.mT * (log_scale + k[..., self.width :].sum(-1))[..., None, :].exp()

    def _oracle(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, keep: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        w = self._weights(q, k)
        w = w.tril() if is_causal else w
        w = w if keep is None else w * keep[:, None, None, :]
        w = w if segments is None else w * (segments[:, None, :, None] == segments[:, None, None, :])
        plain = feature_method(self.method).normalizer == "none"
        normalizer = torch.ones_like(w[..., :1]) if plain else w.sum(-1, keepdim=True)
        return torch.where(normalizer == 0, 0.0, w @ v / torch.where(normalizer == 0, 1.0, normalizer))

    def _close(self, found: Tensor, expected: Tensor, what: str) -> None:
        room = self.tolerance * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(found, expected, rtol=0, atol=room, msg=lambda text: f"{what}: {text}")
