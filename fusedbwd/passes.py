"""Our passes as Inductor takes them: with identities that keep its caches honest.

Inductor's cache key contains the ``uuid`` of every custom pass. Ours hashes everything that a
result can depend on: all sources and data of this package, kernels included, the configuration,
the list of ops kept whole, and the versions of torch and triton.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusedbwd import compat
from fusedbwd.config import Config
from fusedbwd.launch import launch_pass


class Pass(CustomGraphPass):
    """``run`` as an Inductor pass whose identity is ``key`` and our own sources."""

    def __init__(self, name: str, run: Callable[[fx.Graph], None], key: str):
        self.name, self.run, self.key = name, run, key

    def __call__(self, graph: fx.Graph) -> None:
        self.run(graph)

    def uuid(self) -> str:
        return f"fusedbwd.{self.name}({self.key}) {fingerprint()}"


class PassSequence(CustomGraphPass):
    """Several passes as one; without an identity unless each has one."""

    def __init__(self, passes: Sequence):
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> tuple | None:
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return None if None in ids else ids


@cache
def fingerprint() -> str:
    """A hash of this package's sources and data, the ops kept whole, and the versions of torch
    and triton."""
    import triton

    digest = hashlib.sha256()
    for item in (torch.__version__, triton.__version__, *map(str, compat.KEPT_WHOLE)):
        digest.update(item.encode())
    package = Path(__file__).parent
    sources = {*package.rglob("*.py"), *(package / "patterns").rglob("*.py")}
    for path in sorted(sources | {*package.rglob("*.json")}):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def launching(config: Config) -> dict[str, Any]:
    """Inductor settings under which fused ops become kernel launches, the user's passes first."""
    ours = Pass("launch", launch_pass, config.key())
    return {"post_grad_custom_post_pass": after_users("post_grad_custom_post_pass", ours)}


def after_users(setting: str, ours: CustomGraphPass) -> CustomGraphPass:
    """``ours`` behind the passes that the user has put in this Inductor setting."""
    users = getattr(inductor_config, setting)
    if users is None:
        return ours
    listed = tuple(users) if isinstance(users, (list, tuple)) else (users,)
    return PassSequence((*listed, ours))
