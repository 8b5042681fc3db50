"""Two processes that run a test's jobs, and the comparison with one process in eager PyTorch."""

import copy
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from functorch.compile import make_boxed_func
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fusedbwd
from fusedbwd.numerics import budget, relative_l2, within

WORLD = 2
TIMEOUT = 400  # seconds, of a job and of a collective in it: compiling on a busy machine


class Ranks:
    """Two ranks of one process group, on the CPU or on two GPUs.

    They find each other through a file, so that no port can be taken by somebody else, and
    are started anew after a job that failed, since they may then be out of step.
    """

    def __init__(self, device: str, tmp_path_factory):
        self.device, self._folders = device, tmp_path_factory
        self._processes, self._pipes = [], []

    def run(self, job: Callable, *args) -> list:
        """``job(mesh, *args)`` in both ranks at once; what they return, in order of ranks.

        ``job`` is a function of a module's top level.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        results, pending = {}, list(self._pipes)
        while pending:
            ready = wait(pending, TIMEOUT)
            if not ready:
                self.stop(at_once=True)
                raise AssertionError(f"{job.__name__}: no answer within {TIMEOUT} s")
            for pipe in ready:
                pending.remove(pipe)
                failure, results[self._pipes.index(pipe)] = pipe.recv()
                if failure:
                    self.stop(at_once=True)
                    raise AssertionError(f"{job.__name__} failed in a rank:\n{failure}")
        return [results[rank] for rank in range(WORLD)]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = self._folders.mktemp("ranks") / "store"
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            args = (rank, self.device, str(store), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self, at_once: bool = False) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill() if at_once else pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT)
        self._processes, self._pipes = [], []


def _serve(rank: int, device: str, store: str, pipe) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # no pool of processes for a few small kernels
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )
    mesh = init_device_mesh(device, (WORLD,))
    while (work := pipe.recv()) is not None:
        job, args = work
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send((None, job(mesh, *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


@dataclass
class Outcome:
    """What one rank found.

    Attributes:
        errors: of each gradient against float64, beside what it may be.
        counts, misses: of the report, misses as (fusion, reason).
        warnings: all that training gave.
        strides: names of parameters whose gradient has other strides.
        device: "cpu" or "cuda".
    """

    errors: dict[str, tuple[float, float]]
    counts: dict[str, int]
    misses: list[tuple[str, str]]
    warnings: list[str]
    strides: list[str]
    device: str

    def check(self, counts: dict[str, int]) -> None:
        """Asserts that these fusions fired and that all gradients are right."""

        def asked(found: dict[str, int]) -> dict[str, int]:
            if self.device == "cpu":
                return found
            # A GPU's matmuls go by what was measured there.
            return {name: n for name, n in found.items() if "matmul" not in name}

        assert asked(self.counts) == asked(counts), (self.counts, self.misses)
        wrong = {name: found for name, found in self.errors.items() if not within(*found)}
        assert self.errors and not wrong, wrong
        assert not self.strides
        assert not [w for w in self.warnings if "stride" in w.lower()], self.warnings


def interpreted(mesh: DeviceMesh) -> Callable | None:
    """An ``inner_compile`` for cases where only our graphs matter: on a CPU they are run as they
    are, which spares Inductor's time; on a GPU they are compiled."""
    if mesh.device_type == "cuda":
        return None
    return lambda gm, inputs, **options: make_boxed_func(gm.forward)


Draw = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def train(
    mesh: DeviceMesh, wrapped: nn.Module, eager: nn.Module, draw: Draw, rounds: int = 4
) -> Outcome:
    """Gradients of ``wrapped``, averaged over ranks, against those of one process.

    Args:
        wrapped: the compiled module, parallelised in one way or other.
        eager: its twin as it was before, in the dtype that is computed in.
        draw: ``draw(round, rank)`` gives an input and the gradient of the result.
        rounds: errors are taken over all of them together: small gradients are matters of luck.
    """
    exact, rank = copy.deepcopy(eager).double(), mesh.get_rank()
    single = [name for name, _ in eager.named_parameters()]
    dtype = next(eager.parameters()).dtype
    ours, theirs, right = [], [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turn in range(rounds):
            wrapped.zero_grad()
            x, grad = draw(turn, rank)
            wrapped(x).backward(grad.to(dtype))
            grads = {n: p.grad for n, p in zip(single, wrapped.parameters(), strict=True)}
            ours.append({name: _whole(grad) for name, grad in grads.items()})
            theirs.append(_averaged(eager, turn, draw))
            right.append(_averaged(exact, turn, draw))

    errors = {}
    for name in single:
        grad, eagers, expected = (
            torch.stack([r[name] for r in run]) for run in (ours, theirs, right)
        )
        allowed = budget(relative_l2(eagers, expected), grad.dtype, dtype)
        errors[name] = (relative_l2(grad, expected), allowed)
    report = fusedbwd.report(wrapped)
    return Outcome(
        errors,
        report.counts(),
        [(miss.fusion, miss.reason) for miss in report.missed],
        [str(w.message) for w in caught],
        [n for n, p in zip(single, wrapped.parameters(), strict=True) if not _same_strides(p)],
        mesh.device_type,
    )


def _averaged(module: nn.Module, turn: int, draw: Draw) -> dict[str, torch.Tensor]:
    """The mean over all ranks' data of the gradients of ``module``, in one process."""
    dtype = next(module.parameters()).dtype
    total: dict[str, Any] = {}
    for rank in range(WORLD):
        module.zero_grad()
        x, grad = draw(turn, rank)
        module(x.to(dtype) if x.is_floating_point() else x).backward(grad.to(dtype))
        for name, parameter in module.named_parameters():
            wide = parameter.grad.cpu().to(torch.promote_types(dtype, torch.float32))
            total[name] = total.get(name, 0) + wide / WORLD
    return total


def _whole(grad: torch.Tensor) -> torch.Tensor:
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().cpu().clone()


def _same_strides(parameter: nn.Parameter) -> bool:
    def local(t):
        return t.to_local() if isinstance(t, DTensor) else t

    return local(parameter.grad).stride() == local(parameter).stride()
