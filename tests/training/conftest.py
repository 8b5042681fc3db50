"""What the tests of training features share."""

import pytest
from functorch.compile import make_boxed_func

import fusedbwd


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    """Nothing compiled before counts."""


@pytest.fixture
def graphs(monkeypatch):
    """Runs the partitioned graphs as they are, without generating code, which takes its time; the
    list gets the backward graphs as they are compiled."""
    backwards = []

    def run_as_is(gm, inputs, is_backward=False, **options):
        if is_backward:
            backwards.append(gm)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(fusedbwd.training, "compile_fx_inner", run_as_is)
    return backwards
