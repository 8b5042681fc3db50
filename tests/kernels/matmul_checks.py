"""What the tests of the matmul kernels share: small tiles, and operands."""

import pytest
import torch

from fusedbwd.kernels._matmul import MatmulTile

TILE = MatmulTile(16, 32, 16, stages=2, warps=4)
LARGER_TILE = MatmulTile(64, 64, 32, stages=2, warps=4)
GPU_TILES = [
    MatmulTile(128, 128, 64, stages=4, warps=8, subtiles=4, early=2),
    MatmulTile(128, 128, 64, stages=3, warps=8, programs_per_sm=2, subtiles=2, staged=True),
]
TOKENS = [0, 1, 7, 127, 449]
# The interpreter multiplies bfloat16 wrongly; a GPU has no use for float32 here.
DTYPES = [torch.float16] if torch.cuda.is_available() else [torch.float16, torch.float32]

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_epilogues = pytest.mark.parametrize(
    "epilogue",  # of four pieces
    [{"early": 1}, {"early": 3}, {"early": 4}, {"staged": True}, {"staged": True, "early": 1}],
    ids=str,
)
over_tokens = pytest.mark.parametrize("tokens", TOKENS)


def tile_for(tokens, **changes):
    """A small tile; not too small where there are many tokens: the interpreter is slow."""
    return (TILE if tokens < 100 else LARGER_TILE)._replace(**changes)


def draw(*shapes, dtype, device, seed=0):
    """Random tensors of the given shapes, drawn in float32 and rounded."""
    torch.manual_seed(seed)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def columns(*widths, tokens, dtype, device):
    """Matrices [tokens, width] that are slices of one random packed buffer."""
    (packed,) = draw((tokens, sum(widths)), dtype=dtype, device=device, seed=tokens)
    return packed.split(widths, 1)
