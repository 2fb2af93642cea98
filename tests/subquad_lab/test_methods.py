import pytest

import subquad
from subquad.methods import BUILT_IN
from subquad_lab import UsageError
from subquad_lab.methods import METHODS, parse_method, refuse_many_features


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("exact", subquad.Exact()),
        ("taylor", subquad.Taylor()),
        ("taylor:4", subquad.Taylor(degree=4)),
        ("random:64", subquad.RandomFeatures(num_features=64)),
        ("linear:elu", subquad.Linear(activation="elu")),
        ("separable", subquad.Separable()),
        ("multipole:8", subquad.Multipole(top=8)),
        ("window", subquad.Window(256)),
        ("window:64", subquad.Window(64)),
    ],
)
def test_spec_names_the_method(spec, method):
    assert parse_method(spec) == method


def test_every_method_of_the_library_has_its_name():
    assert list(METHODS.items()) == [(kind.name, kind) for kind in BUILT_IN]
    for name, kind in METHODS.items():
        assert parse_method(name) == kind()
        if kind.argument is not None:
            default = getattr(kind(), kind.argument)
            assert parse_method(f"{name}:{default}") == kind()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("softmax", "'softmax' is unknown; expected one of exact, taylor"),
        ("", "'' is unknown"),
        ("taylor:two", "degree must be a whole number, not 'two'"),
        ("taylor:", "degree must be a whole number, not ''"),
        ("exact:2", "exact takes nothing after the colon"),
        ("random:0", "--method: 'random:0': .*num_features"),
        ("window:0", "--method: 'window:0': size: expected a whole number from 1"),
        ("window:near", "size must be a whole number, not 'near'"),
        ("block_sparse", "'block_sparse' is unknown"),
        ("linear:tanh", "--method: 'linear:tanh': .*activation"),
    ],
)
def test_wrong_spec_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        parse_method(spec)


def test_many_features_are_refused_and_a_wide_window_is_not():
    refuse_many_features("window:100000", 64)
    refuse_many_features("taylor:2", 64)
    with pytest.raises(UsageError, match="taylor:4 has 814,385 features at width 64; expected at most 65,536"):
        refuse_many_features("taylor:4", 64)
