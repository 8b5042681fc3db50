"""Inductor's cache on disk: never stale, and warm where nothing has changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedbwd import Config, compat, passes
from fusedbwd.passes import Pass, PassSequence, after_users, fingerprint

ROOT = Path(__file__).parents[1]

PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
import fusedbwd

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(24), nn.Linear(24, 16), nn.Linear(16, 24)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))

def step(module):
    torch.manual_seed(1)
    x = torch.randn(2, 5, 24, requires_grad=True)
    module.zero_grad()
    module(x).square().sum().backward()
    return [x.grad.tolist(), *(p.grad.tolist() for p in module.parameters())]

torch.manual_seed(0)
module = Block()
exact = step(module)
plain = sys.argv[1] == "plain"
if plain:
    module.compile()
else:
    fusedbwd.compile(module, config=fusedbwd.Config(**json.loads(sys.argv[1])))
found = step(module)
worst = max(
    (torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(found, exact)
)
inductor = counters["inductor"]
print(json.dumps({
    "counts": {} if plain else fusedbwd.report(module).counts(),
    "hits": inductor["fxgraph_cache_hit"],
    "misses": inductor["fxgraph_cache_miss"],
    "bypasses": inductor["fxgraph_cache_bypass"],
    "error": worst,
}))
"""

BOTH = {"gelu_backward": 1, "layer_norm_backward": 1}


def execute(program, folder, package, *arguments):
    """What a process that imports ``package`` prints last, with Inductor's cache in ``folder``."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run(folder, package, settings):
    """What one process counts, its numbers checked."""
    argument = settings if isinstance(settings, str) else json.dumps(settings)
    found = execute(PROGRAM, folder, package, argument)
    assert found.pop("error") < 1e-4
    return found


def test_processes_that_share_a_cache(tmp_path):
    """Each behaves as it is configured; what is unchanged, and only that, is served again."""
    package, cache = tmp_path / "package", tmp_path / "cache"
    copy_package(package)
    cache.mkdir()
    cold = {"hits": 0, "misses": 2, "bypasses": 0}  # forward and backward
    warm = {"hits": 2, "misses": 0, "bypasses": 0}
    off = {"gelu_backward": False}
    assert run(cache, package, {}) == {"counts": BOTH, **cold}
    assert run(cache, package, off) == {"counts": {"layer_norm_backward": 1}, **cold}
    assert run(cache, package, "plain") == {"counts": {}, **cold}
    assert run(cache, package, {}) == {"counts": BOTH, **warm}
    kernel = package / "fusedbwd" / "kernels" / "gelu.py"
    kernel.write_text(kernel.read_text() + "# edited")
    assert run(cache, package, {}) == {"counts": BOTH, **cold}


def copy_package(target):
    """The package's sources under ``target``, where nobody else edits them."""
    shutil.copytree(ROOT / "fusedbwd", target / "fusedbwd", symlinks=False)


# --- identities


def identity(config=Config()):  # noqa: B008
    return Pass("fuse", print, config.key()).uuid()


def test_every_setting_is_part_of_the_identity():
    seen = {identity()}
    for name, value in vars(Config()).items():
        other = (not value) if isinstance(value, bool) else True
        seen.add(identity(Config(**{name: other})))
    assert len(seen) == len(vars(Config())) + 1
    assert identity() == identity(Config())


@pytest.fixture
def fresh_fingerprint():
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


def test_what_the_fingerprint_covers(tmp_path, monkeypatch, fresh_fingerprint):
    copy_package(tmp_path)
    package = tmp_path / "fusedbwd"
    monkeypatch.setattr(passes, "__file__", str(package / "passes.py"))

    def again():
        fingerprint.cache_clear()
        return fingerprint()

    first = again()
    assert again() == first
    seen = {first}
    sources = ["kernels/gelu.py", "patterns/algebra.py", "fuse.py", "kernels/_op.py"]
    for source in sources:
        path = package / source
        text = path.read_text()
        path.write_text(text + "#")
        seen.add(again())
        path.write_text(text)
        assert again() == first
    table = package / "data" / "fusions_h200.json"
    table.write_text(table.read_text() + " ")
    seen.add(again())
    (package / "kernels" / "more.py").write_text("")
    seen.add(again())
    (package / "kernels" / "more.py").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(compat, "KEPT_WHOLE", compat.KEPT_WHOLE[1:])
        seen.add(again())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        seen.add(again())
    assert len(seen) == len(sources) + 5


def test_the_sources_include_the_patterns():
    """patterns/ is a link in the repository: it must be followed."""
    package = Path(passes.__file__).parent
    assert list((package / "patterns").rglob("*.py"))


def test_a_sequence_has_an_identity_only_if_all_have():
    ours, theirs = Pass("fuse", print, "a"), Pass("launch", print, "b")
    assert PassSequence([ours, theirs]).uuid() == (ours.uuid(), theirs.uuid())
    assert PassSequence([ours, print]).uuid() is None
    assert PassSequence([theirs, ours]).uuid() != PassSequence([ours, theirs]).uuid()


def test_passes_run_in_order():
    order = []
    first, second = (Pass(name, lambda graph, n=name: order.append(n), "") for name in "ab")
    PassSequence([first, second])(None)
    assert order == ["a", "b"]
    with torch._inductor.config.patch(joint_custom_pre_pass=first):
        after_users("joint_custom_pre_pass", second)(None)
    assert order == ["a", "b"] * 2
    assert after_users("joint_custom_pre_pass", second) is second


GUARDING = """
import json, torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from fusedbwd import export_backward
from fusedbwd.problems import get_problem

class Guarding(CustomGraphPass):
    def __call__(self, graph):
        first = next(iter(graph.nodes)).meta["val"]
        if first.shape[0] <= 100:
            pass

    def uuid(self):
        return "guarding"

torch._inductor.config.post_grad_custom_pre_pass = Guarding()
problem = get_problem("ffn_gelu_backward")
module = problem.build(**problem.small)
found = []
for _ in range(2):
    (variant,) = export_backward(module, saved=problem.schema(module))._variants
    found.append({
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "fits": [variant.fits({"batch_size": b, "seq_len": 30}) for b in (8, 100, 101)],
    })
print(json.dumps(found))
"""


def test_guards_on_sizes_are_cached(tmp_path):
    """An entry made for some sizes is not taken for others, and tells what it is good for."""
    missed, hit = execute(GUARDING, tmp_path, ROOT)
    assert hit["hits"] > missed["hits"]
    assert missed["fits"] == hit["fits"] == [True, True, False]
