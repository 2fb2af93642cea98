"""A conformance suite that every feature map is put through, also a user's own.

By one call:

    check_feature_map(MyMap(), width=8)

or, to see each check as a test of its own under pytest, by one inherited class:

    class TestMyMap(FeatureMapConformance):
        method = MyMap()

The oracle is all pairs at once, from the map alone: w_ij = phi(q_i).phi(k_j) exp(c_j), in float64. A map that has
parameters is computed in their dtype, so give it float64 ones, or be content with `tolerance`.
"""

import torch
from torch import Tensor, nn

from subquad._attention import attend, attention
from subquad._dispatch import Form
from subquad._features import FeatureMap, Linear
from subquad._methods import mapped, shifted


def check_feature_map(method: FeatureMap, width: int = 8, tolerance: float = 1e-9) -> None:
    """Raise AssertionError at the first promise that the map, of inputs (..., n, width), does not keep.

    >>> from subquad import Taylor
    >>> check_feature_map(Taylor(2), width=3)
    """
    suite = FeatureMapConformance()
    suite.method, suite.width, suite.tolerance = method, width, tolerance
    for name in dir(FeatureMapConformance):
        if name.startswith("test_"):
            getattr(suite, name)()


class FeatureMapConformance:
    """Inherit from it under a name that begins with Test, and set `method`; `width` and `tolerance` if need be."""

    method: FeatureMap
    width: int = 8
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    length: int = 21

    def test_features_have_the_promised_size(self) -> None:
        features, log_scale = self._features(self._inputs()[1], is_query=False)
        assert features.shape == (2, 3, self.length, self.method.size(self.width)), tuple(features.shape)
        assert log_scale.shape == (2, 3, self.length), tuple(log_scale.shape)
        assert bool(features.isfinite().all()), "features of finite inputs are not finite"

    def test_features_of_a_token_depend_on_that_token_alone(self) -> None:
        _, k, _ = self._inputs()
        edited = k.clone()
        edited[:, :, 5] += 1
        for is_query in (False, True):
            for before, after in zip(self._features(k, is_query), self._features(edited, is_query), strict=True):
                assert torch.equal(before[:, :, :5], after[:, :, :5]), "features of a token changed with another's"
                assert torch.equal(before[:, :, 6:], after[:, :, 6:]), "features of a token changed with another's"

    def test_weights_are_positive_where_promised(self) -> None:
        q, k, v = self._inputs()
        if not self.method.positive:
            return
        assert bool((self._weights(q, k) >= 0).all()), "positive is promised, but a weight is negative"
        output = attention(q, k, v, method=self.method)
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
                    forms: tuple[Form, ...] = ("dense", "chunked", "fused")
                    for form in forms:
                        output, _ = attend(
                            q, k, v, None, 0.0, is_causal, None, False, self.method, padding, packing, None, False,
                            form, 4,
                        )  # fmt: skip
                        self._close(output, expected, f"{form}, causal={is_causal}")

    def test_gradients_agree_with_all_pairs(self) -> None:
        q, k, v = (x.requires_grad_() for x in self._inputs())
        learned = tuple(self.method.parameters()) if isinstance(self.method, nn.Module) else ()
        for is_causal in (False, True):
            loss = self._oracle(q, k, v, is_causal, None, None).square().sum()
            expected = torch.autograd.grad(loss, (q, k, v, *learned), allow_unused=True, materialize_grads=True)
            loss = attention(q, k, v, is_causal=is_causal, method=self.method).square().sum()
            found = torch.autograd.grad(loss, (q, k, v, *learned), allow_unused=True, materialize_grads=True)
            for a, b in zip(found, expected, strict=True):
                self._close(a, b, f"gradient, causal={is_causal}")

    def test_cut_and_resumed_is_the_whole(self) -> None:
        q, k, v = self._inputs()
        whole = attention(q, k, v, is_causal=True, method=self.method)
        state, outputs = None, []
        for part in torch.arange(self.length).split([9, 1, 1, self.length - 11]):
            q_p, k_p, v_p = (x[:, :, part] for x in (q, k, v))
            output, state = attention(q_p, k_p, v_p, is_causal=True, method=self.method, state=state, return_state=True)
            outputs.append(output)
        self._close(torch.cat(outputs, 2), whole, "resumed")

    def test_the_future_does_not_reach_the_past(self) -> None:
        q, k, v = self._inputs()
        past = attention(q, k, v, is_causal=True, method=self.method)[:, :, :9]
        for edit in (1e3, float("nan"), float("inf")):
            q_e, k_e, v_e = (x.index_fill(2, torch.arange(9, self.length), edit) for x in (q, k, v))
            after = attention(q_e, k_e, v_e, is_causal=True, method=self.method)[:, :, :9]
            assert torch.equal(past, after), f"the past changed when the future became {edit}"

    def test_what_padding_hides_leaves_no_trace(self) -> None:
        q, k, v = self._inputs()
        keep = torch.arange(self.length) < 15
        expected = attention(q, k[:, :, :15], v[:, :, :15], method=self.method)
        spoiled_k, spoiled_v = (x.clone().index_fill_(2, torch.arange(15, self.length), float("nan")) for x in (k, v))
        spoiled_k.requires_grad_()
        output = attention(q, spoiled_k, spoiled_v, method=self.method, key_padding_mask=keep)
        self._close(output, expected, "padded")
        output.sum().backward()
        assert spoiled_k.grad is not None and not spoiled_k.grad[:, :, 15:].any(), "a hidden key has a gradient"
        nothing = attention(q, k, v, method=self.method, key_padding_mask=torch.zeros_like(keep))
        assert not nothing.any(), "a row that sees no key is not 0"

    def test_half_precision_is_computed_in_float32(self) -> None:
        if isinstance(self.method, nn.Module):
            return  # Its parameters decide.
        q, k, v = (x.half() for x in self._inputs())
        output = attention(q, k, v, is_causal=True, method=self.method)
        wide = attention(q.float(), k.float(), v.float(), is_causal=True, method=self.method)
        assert output.dtype == torch.float16
        assert torch.equal(output, wide.to(torch.float16)), "half precision entered the computation"

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, self.length, width, generator=generator) for width in (self.width, self.width, 5))
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def _features(self, x: Tensor, is_query: bool) -> tuple[Tensor, Tensor]:
        features, log_scale = mapped(self.method, x, is_query=is_query)
        return features, torch.zeros_like(features[..., 0]) if log_scale is None else log_scale

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        root = self.width**-0.25  # Of the default scale.
        a, _ = self._features(q * root, is_query=True)
        c, log_scale = self._features(shifted(self.method, k, k.shape[-3]) * root, is_query=False)
        return a @ c.mT * log_scale[..., None, :].exp()

    def _oracle(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, keep: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        w = self._weights(q, k)
        w = w.tril() if is_causal else w
        w = w if keep is None else w * keep[:, None, None, :]
        w = w if segments is None else w * (segments[:, None, :, None] == segments[:, None, None, :])
        plain = isinstance(self.method, Linear) and self.method.activation == "identity"
        normalizer = torch.ones_like(w[..., :1]) if plain else w.sum(-1, keepdim=True)
        return torch.where(normalizer == 0, 0.0, w @ v / torch.where(normalizer == 0, 1.0, normalizer))

    def _close(self, found: Tensor, expected: Tensor, what: str) -> None:
        room = self.tolerance * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(found, expected, rtol=0, atol=room, msg=lambda text: f"{what}: {text}")
