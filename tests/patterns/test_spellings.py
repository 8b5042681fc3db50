"""Every spelling of the table fuses as it says, or says why not; the docs quote how many do."""

import re
from pathlib import Path

import pytest
from harness import arguments_of
from spellings import SPELLINGS
from torch import nn

from fusedbwd import Config

DOCS = Path(__file__).resolve().parents[2] / "docs" / "fusions.md"


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(check, name):
    s = SPELLINGS[name]
    if isinstance(s.program, nn.Module):
        program, shapes = s.program.to(s.dtype), s.shapes
    else:
        program, shapes = s.program, arguments_of(s.program, **s.shapes)
    report = check(
        program,
        shapes,
        s.dtype,
        dynamic=s.dynamic,
        frozen=s.frozen,
        fires=s.fires,
        # Matmuls around a spelling do not depend on it.
        config=Config(
            verify=True,
            sum_matmul=False,
            matmul_swiglu_backward=False,
            matmul_gelu_backward=False,
        ),
    )
    if not s.fires:
        reasons = [miss.reason for miss in report.missed]
        assert [s.reason in r for r in reasons] == [True] if s.reason else not reasons, reasons


def test_docs_quote_the_count():
    """Each spelling counts once, whether one fusion fires in it or several."""
    fused = sum(bool(s.fires) for s in SPELLINGS.values())
    assert fused >= 24
    quoted = re.findall(r"(\d+) of (\d+) spellings", DOCS.read_text())
    assert quoted == [(str(fused), str(len(SPELLINGS)))]


def test_docs_name_what_does_not_fuse():
    text = " ".join(DOCS.read_text().split())
    for name, s in SPELLINGS.items():
        assert s.fires or name.partition(": ")[2] in text, name
