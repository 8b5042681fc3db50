"""What fusedbwd.compile leaves alone: the module, torch's settings, the user's own passes."""

import copy
import io
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from trained import HIDDEN, TINY_COUNTS, TinyBlock, assert_as_eager, compiled_tiny

import fusedbwd
from fusedbwd import UnsupportedError

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- the module stays what it was


def test_module_is_the_same(tiny):
    module = copy.deepcopy(tiny)
    keys, parameters = list(module.state_dict()), list(module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert fusedbwd.compile(module) is module
    assert type(module) is TinyBlock
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    before = module.fc1.weight.clone()
    module(torch.randn(2, 5, HIDDEN)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.fc1.weight, before)
    module.load_state_dict(tiny.state_dict(), strict=True)
    tiny.load_state_dict(module.state_dict(), strict=True)


def test_copies_are_not_compiled(tiny):
    module = compiled_tiny(tiny)
    module(torch.randn(2, 5, HIDDEN)).sum().backward()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not torch.equal(module.fc1.weight, other.fc1.weight)
        x = torch.randn(2, 5, HIDDEN)
        torch.testing.assert_close(other(x), x)
        with pytest.raises(UnsupportedError, match="TinyBlock was not compiled"):
            fusedbwd.report(other)


# --- settings and passes that are not ours


def settings():
    configs = (inductor_config, functorch_config, torch._dynamo.config)
    return [dict(config.get_config_copy()) for config in configs]


def test_compiling_leaves_all_settings(tiny):
    before = settings()
    compiled_tiny(tiny, verify=True)(torch.randn(2, 5, HIDDEN)).sum().backward()
    assert settings() == before


def test_an_error_leaves_all_settings(tiny, monkeypatch):
    class Mine(Exception):
        pass

    def fail(graph, config):
        raise Mine

    before = settings()
    monkeypatch.setattr(fusedbwd.training, "fuse", fail)
    x = torch.randn(2, 5, HIDDEN)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        compiled_tiny(tiny)(x)
    assert isinstance(error.value.inner_exception, Mine)
    assert settings() == before
    torch.testing.assert_close(torch.compile(copy.deepcopy(tiny))(x), tiny(x))


IMPORT = """
import json, torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
import torch._dynamo, torch._inductor.compile_fx, torch._inductor.pattern_matcher
from torch._inductor.decomposition import select_decomp_table

def snapshot():
    configs = (inductor_config, functorch_config, torch._dynamo.config)
    return (
        [{k: repr(v) for k, v in c.get_config_copy().items()} for c in configs],
        len(select_decomp_table()),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.get_rng_state().tolist(), nn.Module.__call__, nn.Module.compile, torch.compile,
    )

before = snapshot()
import fusedbwd, fusedbwd.inspection, fusedbwd.verify, fusedbwd.bench
print(json.dumps(snapshot() == before))
"""


def test_importing_changes_nothing():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) is True


class Recorder(CustomGraphPass):
    """A user's pass: notes the fused ops that it sees. Never the same twice, so never cached."""

    def __init__(self):
        self.identity = uuid.uuid4().hex
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(n.target) for n in graph.nodes if "fusedbwd" in str(n.target)])

    def uuid(self):
        return self.identity


def test_the_users_passes_go_on_running(tiny):
    joint, post, before_post = Recorder(), Recorder(), Recorder()
    with inductor_config.patch(
        joint_custom_pre_pass=joint,
        post_grad_custom_post_pass=post,
        post_grad_custom_pre_pass=before_post,
    ):
        compiled = compiled_tiny(tiny)
        assert_as_eager(compiled, tiny, 2, 5)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS
    assert joint.seen == [[]]  # it runs before ours
    for recorder in (post, before_post):
        assert len(recorder.seen) == 2  # forward and backward
        assert not recorder.seen[0] and len(recorder.seen[1]) == 2


def test_a_users_pass_that_is_a_function(tiny):
    seen = []
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: seen.append(graph)):
        compiled = compiled_tiny(tiny)
        assert_as_eager(compiled, tiny, 2, 5)
    assert len(seen) == 2
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def test_plain_torch_compile_in_between(tiny):
    recorder = Recorder()
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    fused = compiled_tiny(tiny)
    fused(x).sum().backward()
    with inductor_config.patch(post_grad_custom_post_pass=recorder):
        plain = torch.compile(copy.deepcopy(tiny))
        plain(x).sum().backward()
    assert recorder.seen == [[], []]
    again = compiled_tiny(tiny)
    again(x).sum().backward()
    for module in (fused, again):
        assert fusedbwd.report(module).counts() == TINY_COUNTS
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
