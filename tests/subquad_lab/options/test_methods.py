import pytest

import subquad
from subquad.methods import BUILT_IN
from subquad_lab import UsageError
from subquad_lab.options.methods import parse_method, refuse_many_features


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("exact", subquad.Exact()),
        ("taylor", subquad.Taylor()),
        ("taylor:4", subquad.Taylor(degree=4)),
        ("random:64", subquad.RandomFeatures(num_features=64)),
        ("linear", subquad.Linear(activation="elu")),
        ("linear:identity", subquad.Linear(activation="identity")),
        ("separable", subquad.Separable()),
        ("multipole:8", subquad.Multipole(top=8)),
        ("window", subquad.Window(256)),
        ("window:64", subquad.Window(64)),
        ("window:64:4", subquad.Window(64, sinks=4)),
    ],
)
def test_spec_names_the_method(spec, method):
    assert parse_method(spec) == method


def test_every_method_of_the_library_has_its_name():
    for kind in BUILT_IN:
        assert parse_method(kind.name) == kind()
        if kind.argument is not None:
            default = getattr(kind(), kind.argument)
            assert parse_method(f"{kind.name}:{default}") == kind()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("softmax", "--method: expected one of 'exact', 'taylor', .* got 'softmax'$"),
        ("", "expected one of .* got ''$"),
        ("tailor:3", r"got 'tailor:3'; did you mean 'taylor:3'\?"),
        ("Linear", r"got 'Linear'; did you mean 'linear'\?"),
        ("taylor:two", "expected an integer for degree in 'taylor:two', got 'two'"),
        ("taylor:", "expected an integer for degree in 'taylor:', got ''"),
        ("exact:2", "'exact' takes nothing after its name, got 'exact:2'"),
        ("random:0", "--method: 'random:0': .*num_features"),
        ("window:0", "--method: 'window:0': size: expected an integer from 1"),
        ("window:near", "expected an integer for size in 'window:near', got 'near'"),
        ("window:64:x", "expected an integer for sinks in 'window:64:x', got 'x'"),
        ("window:64:-1", "'window:64:-1': sinks: expected an integer from 0"),
        ("window:64:4:5", "expected an integer for sinks in 'window:64:4:5', got '4:5'"),
        ("taylor:2:3", "expected an integer for degree in 'taylor:2:3', got '2:3'"),
        ("block_sparse", "expected one of .* got 'block_sparse'"),
        ("linear:tanh", "--method: 'linear:tanh': .*activation"),
    ],
)
def test_wrong_spec_is_named(spec, message):
    with pytest.raises(UsageError, match=message):
        parse_method(spec)


def test_many_features_are_refused_and_a_wide_window_is_not():
    refuse_many_features("window:100000", 64)
    refuse_many_features("taylor:2", 64)
    with pytest.raises(UsageError, match="expected at most 65,536 features, got 814,385 for taylor:4 at width 64"):
        refuse_many_features("taylor:4", 64)
