"""What a user's schema saves is used as given, by whatever the backward was fused into."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusedbwd import Config, export_backward, infer_schema, tag
from fusedbwd import schema as s
from fusedbwd.patterns import PATTERNS

WIDTH = 24
OFF = Config(**{pattern.name: False for pattern in PATTERNS})


class Norm(nn.Module):
    """RMSNorm or LayerNorm before a projection; tags what it is told to."""

    def __init__(self, saved, centered):
        super().__init__()
        self.saved, self.centered = saved, centered
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.eps = 1e-3

    def tag(self, tensor, name):
        return tag(tensor, name) if name in self.saved else tensor

    def forward(self, x):
        if self.centered:
            mean = self.tag(x.mean(-1, keepdim=True), "mean")
            var = torch.var(x, -1, correction=0, keepdim=True)
            x_centered = x - mean
        else:
            var, x_centered = x.pow(2).mean(-1, keepdim=True), x
        var = self.tag(var, "var")
        if "std" in self.saved:
            normalized = x_centered / self.tag(torch.sqrt(var + self.eps), "std")
        else:
            normalized = x_centered * self.tag(torch.rsqrt(var + self.eps), "rstd")
        normalized = self.tag(normalized, "normalized")
        return x + self.tag(normalized * self.weight, "normed") @ self.out


class SwiGLU(nn.Module):
    """linear * silu(act); saves silu(act) too where told to."""

    def __init__(self, saved):
        super().__init__()
        self.saved = saved
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, act, linear):
        activated = F.silu(act)
        if "silu" in self.saved:
            activated = tag(activated, "silu")
        return tag(activated * linear, "product") @ self.down


NORMS = {
    "rms, nothing": (["normed"], False, 1),
    "rms, var": (["normed", "var"], False, 1),
    "rms, rstd": (["normed", "rstd"], False, 1),
    "rms, std": (["normed", "std"], False, 0),
    "rms, normalized and rstd": (["normed", "normalized", "rstd"], False, 1),
    "rms, normalized and var": (["normed", "normalized", "var"], False, 1),
    "layer norm, nothing": (["normed"], True, 1),
    "layer norm, mean and rstd": (["normed", "mean", "rstd"], True, 1),
    "layer norm, mean and var": (["normed", "mean", "var"], True, 1),
    "layer norm, rstd": (["normed", "rstd"], True, 1),
    "layer norm, normalized and rstd": (["normed", "normalized", "rstd"], True, 1),
}


def assert_used_as_given(module, *args, fires):
    """On saved tensors that do not follow from one another, fused and unfused agree; and what
    the schema calls read is read."""
    schema = infer_schema(module, *args, sizes={"batch": 3, "seq": 7})
    fused = export_backward(module, schema, config=Config(verify=True))
    unfused = export_backward(module, schema, config=OFF)
    assert sum(fused.report.counts().values()) == fires, fused.report
    assert fused.report.fired or fused.report.missed
    torch.manual_seed(0)
    sizes = {"batch": 2, "seq": 5}
    inputs = {}
    for i in schema.inputs:
        if i.kind != s.SCALAR:
            shape = s.resolve(i.shape, sizes)
            inputs[i.name] = torch.rand(shape) + 0.5 if shape[-1] == 1 else torch.randn(shape)
    if getattr(module, "centered", False):  # LayerNorm's formulas differ on other means
        mean = inputs["x"].mean(-1, keepdim=True)
        inputs |= {"mean": mean} if "mean" in inputs else {}
        if "normalized" in inputs:
            inputs["normalized"] = (inputs["x"] - mean) * inputs["rstd"]
    for ours, theirs in zip(fused(**inputs), unfused(**inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    tags = {i.name for i in schema.inputs if i.kind == s.SAVED}
    assert fused.unread & tags == unfused.unread & tags


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    saved, centered, fires = NORMS[name]
    torch.manual_seed(1)
    assert_used_as_given(Norm(saved, centered), torch.randn(3, 7, WIDTH), fires=fires)


@pytest.mark.parametrize(("saved", "fires"), [([], 1), (["silu"], 0)], ids=str)
def test_swiglu(saved, fires):
    torch.manual_seed(1)
    args = [torch.randn(3, 7, WIDTH) for _ in range(2)]
    assert_used_as_given(SwiGLU(saved), *args, fires=fires)
