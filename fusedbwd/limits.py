"""What keeps part of a module from being fused, said aloud: a warning once, a line of the report.

Dynamo falls back to eager PyTorch without an error, and mostly without a word: past its recompile
limit, at graph breaks, under torch.func's transforms. Its own records tell afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import torch
from torch import fx
from torch._dynamo import config as dynamo_config

from fusedbwd import compat
from fusedbwd.errors import FusedBwdWarning, UnsupportedError
from fusedbwd.numerics import dtype_name

COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels take."""

RECOMPILE_LIMIT = (
    "torch.compile's recompile limit is reached: from here on, calls that no compiled graph fits "
    "run as eager PyTorch. Where sizes vary, compile with dynamic=True or mark the dimensions with "
    "torch._dynamo.mark_dynamic; otherwise raise torch._dynamo.config.recompile_limit. "
    "Modules of one class count together. TORCH_LOGS=recompiles tells what changed."
)
FUNCTION_TRANSFORM = (
    "called under a transform of torch.func (grad, vmap, jvp, ...), where torch.compile does "
    "nothing: such calls run as eager PyTorch. Call the module outside, with backward()."
)

TRACED_BY_OTHERS = (
    "traced into a torch.compile without fusedbwd around it, where nothing is fused. Give that "
    "module to fusedbwd.compile instead."
)


class Limits:
    """What limited the compilation of one module so far.

    Attributes:
        module: its class, for the warnings.
        frame: what it shares Dynamo's recompile limit by: the code of its forward.
        notes: lines for the report, each once, in the order in which they came up.
        graph_runs: how often a compiled graph has run in the module.
    """

    _frames_past_limit: ClassVar[set[object]] = set()

    def __init__(self, module: str, frame: object):
        self.module, self.frame = module, frame
        self.notes: list[str] = []
        self.graph_runs = 0
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what Dynamo gives up on inside the block, and warns of the first of each kind."""
        if compat.under_function_transform():  # Dynamo's own words on it are about no break
            self._note("transform", FUNCTION_TRANSFORM, [FUNCTION_TRANSFORM])
            yield
            return
        breaks, limits = len(compat.graph_breaks()), compat.recompile_limits_hit()
        given_up, runs = compat.given_up(), self.graph_runs
        try:
            yield
        except BaseException:
            with contextlib.suppress(FusedBwdWarning):  # made an error: not in that one's place
                self._note_since(breaks, given_up, limits, runs)
            raise
        self._note_since(breaks, given_up, limits, runs)

    def _note_since(self, breaks: int, given_up: Counter[str], limits: int, runs: int) -> None:
        """Notes what has come up since there were so many graph breaks, limits hit and runs."""
        places = [f"graph break at {place}" for place in _places(compat.graph_breaks()[breaks:])]
        if not places:  # of what leaves a whole frame to eager PyTorch, the place is not told
            whys = {why.partition("\n")[0] for why in compat.given_up() - given_up}
            places = [f"graph break in a loop, or nested ({why})" for why in sorted(whys)]
        if compat.recompile_limits_hit() > limits:
            self._frames_past_limit.add(self.frame)
            is_past_limit = True
        else:  # Dynamo tells of the first call past it only, which was another module's
            is_past_limit = (
                self.frame in self._frames_past_limit
                and self.graph_runs == runs
                and compat.has_compiled(self.frame)
                and compat.compiling()
            )
        if places:
            said = f"compiled in pieces, and nothing is fused across them: {'; '.join(places)}"
            self._note("break", f"{said}. With fullgraph=True a break is an error.", places, 7)
        if is_past_limit:
            self._note("recompile", RECOMPILE_LIMIT, [RECOMPILE_LIMIT], 7)

    def traced(self) -> None:
        """Notes that Dynamo traces the module as a part of another, unless that is one of ours."""
        if not hooks_guarded.inside:
            self._note("traced", TRACED_BY_OTHERS, [TRACED_BY_OTHERS])

    def _note(self, kind: str, warning: str, notes: list[str], stacklevel: int = 6) -> None:
        self.notes += [note for note in notes if note not in self.notes]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{self.module}: {warning}", FusedBwdWarning, stacklevel=stacklevel)


def _places(breaks: Iterable) -> list[str]:
    """Where and why, once for each line of the user's code: Dynamo breaks a frame and then, at
    the same line, the frame that called it."""
    found: dict[str, str] = {}
    for one in breaks:
        frame = one.user_stack[-1] if one.user_stack else None
        place = f"{frame.filename}:{frame.lineno}" if frame else "an unknown place"
        reason = one.reason.strip().partition("\n")[0]
        if reason.startswith("generic_jump"):
            reason = "Data-dependent branching"
        found.setdefault(place, reason)
    return [f"{place} ({reason})" for place, reason in found.items()]


def dtype_notes(nodes: Iterable[fx.Node]) -> list[str]:
    """A line for each dtype among the tensors of ``nodes``, a graph's gradients, that no kernel
    takes."""
    values = [node.meta.get("val") for node in nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    notes = []
    for dtype in sorted(dtypes.difference(COMPUTED_IN), key=str):
        name = dtype_name(dtype)
        if dtype == torch.float64:
            notes.append(f"{name} gradients: fused ops run as plain PyTorch, no kernel takes them")
        else:
            notes.append(f"{name} gradients: left to Inductor, no fusion takes them")
    return notes


@functools.cache
def warn_if_untested() -> None:
    """Warns, once in a process, where torch is older or newer than what was tested."""
    if not compat.tested():
        low, high = (".".join(map(str, version)) for version in compat.TESTED)
        warnings.warn(
            f"torch {torch.__version__} is untested: fusedbwd was tested with torch {low} to "
            f"{high}. Compile with fusedbwd.Config(verify=True) to have each rewrite checked.",
            FusedBwdWarning,
            stacklevel=3,
        )


def unbatched(run: Callable, gm: fx.GraphModule) -> Callable:
    """``run``, the compiled backward ``gm``, which refuses to run over many gradients at once
    instead of failing inside generated code. (Torch itself refuses ``torch.func.vmap``.)

    Raises:
        UnsupportedError: an incoming gradient is a batch, under ``is_grads_batched=True``.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    tangents = [i for i, n in enumerate(placeholders) if "tangents" in str(n.target)]

    def backward(args: list):
        if any(compat.is_batched(args[i]) for i in tangents):
            raise UnsupportedError(
                "is_grads_batched=True (vmap over the backward, as in a vectorized "
                "torch.autograd.functional.jacobian) is not supported: compute one gradient at a "
                "time, or use a copy.deepcopy of the module, which is not compiled"
            )
        return run(args)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


class _HooksGuarded(threading.local):
    """Inside, Dynamo also guards on modules' having no hooks.

    By default it leaves that out, and a hook added after the first call is silently not called.
    The setting is read when guards are made, so it is changed for the calls only. Settings are
    each thread's own, as from torch 2.13 on Dynamo's are; before, two threads whose calls overlap
    may leave this one on, which is the safe side.
    """

    inside = 0
    _before = True

    def __enter__(self) -> None:
        if self.inside == 0:
            self._before = dynamo_config.skip_nnmodule_hook_guards
            dynamo_config.skip_nnmodule_hook_guards = False
        self.inside += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1
        if self.inside == 0:
            dynamo_config.skip_nnmodule_hook_guards = self._before


hooks_guarded = _HooksGuarded()
