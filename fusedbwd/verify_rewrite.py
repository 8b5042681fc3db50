"""``Config.verify``: a rewrite against the subgraph that it replaces, on random data.

The subgraph is run twice: as traced, and in float64. The fused replacement must be as near
the float64 result as four times the error budget (:func:`fusedbwd.numerics.budget`): one draw
of small tensors is a matter of luck, and a wrong rewrite is off by far more.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusedbwd.errors import VerificationError
from fusedbwd.graph import Extraction, Leak, extract, value
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.patterns import Rewrite

_LUCK = 4
_EXACT = 1e-14  # relative error that float64 results may have themselves


def verify_rewrite(fusion: str, rewrite: Rewrite) -> None:
    """Runs ``rewrite`` and what it replaces on the same random operands.

    Raises:
        VerificationError: an output disagrees, or depends on a tensor that the fused op does
            not read.
    """
    operands = [
        o for o in dict.fromkeys((*rewrite.operands, *rewrite.sources)) if isinstance(o, fx.Node)
    ]
    free = [o for o in operands if not _follows_from(o, _without(operands, o))]
    while True:
        try:
            graph = extract([*rewrite.outputs, *operands], free, substitute=_hint)
            break
        except Leak as leak:
            # What is replaced may get at an operand's source by another way, as where a norm that
            # is applied twice casts its eps twice: then the source is drawn, not the operand.
            source = leak.node
            followed = [o for o in free if _follows_from(o, [source, *_without(free, o)])]
            if not followed:
                raise VerificationError(
                    f"{fusion}: what it replaces depends on {source.name}, which it does not read"
                ) from None
            free = [*_without(free, followed[0]), source]
    # Compilers call this with fake-tensor and tracing modes on; the check is on real data.
    with _disable_current_modes(), torch.no_grad():
        _compare(fusion, rewrite, graph, free, operands)


def _compare(fusion: str, rewrite: Rewrite, graph: fx.Graph, free: list, operands: list) -> None:
    program = fx.GraphModule(torch.nn.Module(), graph)
    given = [_random(value(o), seed) for seed, o in enumerate(free)]
    if rewrite.rounds_to is not None:
        given = [_rounded(t, rewrite.rounds_to) for t in given]
    traced = fx.Interpreter(program).run(*given)
    exact = _Float64(program).run(*(_widened(t) for t in given))

    count = len(rewrite.outputs)
    values = dict(zip(operands, traced[count:], strict=True))
    fused = rewrite.replacement(
        *(values[o] if isinstance(o, fx.Node) else o for o in rewrite.operands)
    )
    for node, ours, unfused, truth in zip(rewrite.outputs, fused, traced, exact, strict=False):
        # Where none of the three is a number (a row that is masked whole, say), they agree.
        undefined = ~(ours.isfinite() | unfused.isfinite() | truth.isfinite())
        ours, unfused, truth = (t.masked_fill(undefined, 0) for t in (ours, unfused, truth))
        error, eager_error = relative_l2(ours, truth), relative_l2(unfused, truth)
        if not within(error, _LUCK * budget(max(eager_error, _EXACT), ours.dtype)):
            raise VerificationError(
                f"{fusion}: {node.name} differs from what it replaces: relative error {error:.2e} "
                f"against float64, unfused {eager_error:.2e}"
            )


def _without(nodes: list[fx.Node], left_out: fx.Node) -> list[fx.Node]:
    return [n for n in nodes if n is not left_out]


def _follows_from(node: fx.Node, others: list[fx.Node]) -> bool:
    if node.op == "placeholder":
        return False
    try:
        extract([node], others, substitute=_hint)
    except Leak:
        return False
    return True


class _Float64(fx.Interpreter):
    """Runs a graph with every floating dtype that it mentions replaced by float64."""

    def call_function(self, target, args, kwargs):
        args, kwargs = fx.node.map_aggregate((args, kwargs), _wide_dtype)
        return super().call_function(target, tuple(args), kwargs)


def _wide_dtype(item):
    is_float = isinstance(item, torch.dtype) and item.is_floating_point
    return torch.float64 if is_float else item


def _widened(item):
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _rounded(item, dtype: torch.dtype):
    return item.to(dtype).to(item.dtype) if isinstance(item, torch.Tensor) else item


def _size(size) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _hint(new: Extraction, node: fx.Node) -> int | None:
    """The size that a size node is taken to have."""
    val = node.meta.get("val")
    return _size(val) if isinstance(val, torch.SymInt) else None


def _random(fake, seed: int):
    """Random data in the place of a fake value; positive where it is a statistic of a row.

    From a generator of its own: the program's random numbers stay what they would be.
    """
    if not isinstance(fake, torch.Tensor):
        return _size(fake)
    shape = [_size(s) for s in fake.shape]
    generator = torch.Generator(fake.device).manual_seed(seed)
    if not fake.dtype.is_floating_point:
        draw = torch.randint(0, 2, shape, generator=generator, device=fake.device)
        return draw.to(fake.dtype)
    is_statistic = not shape or shape[-1] == 1
    make = torch.rand if is_statistic else torch.randn
    data = make(shape, generator=generator, device=fake.device, dtype=torch.float32)
    data = (data + 0.5 if is_statistic else data).to(fake.dtype)
    # In the fake's order of dimensions: the program may view it as only that allows.
    order = sorted(range(data.dim()), key=lambda d: -_size(fake.stride(d)))
    return torch.empty_permuted(shape, order, dtype=data.dtype, device=data.device).copy_(data)
