"""The reference problems: a module, its saved-tensor contract, its cases and its formulas."""

from __future__ import annotations

from fusedbwd.errors import UnsupportedError
from fusedbwd.problems import decoder, ffn
from fusedbwd.problems.problem import Case, Problem, record_inputs

__all__ = ["PROBLEMS", "Case", "Problem", "get_problem", "record_inputs"]

PROBLEMS: dict[str, Problem] = {p.name: p for p in (decoder.PROBLEM, ffn.PROBLEM)}


def get_problem(name: str) -> Problem:
    """The problem called ``name``; UnsupportedError, listing the names, when there is none."""
    try:
        return PROBLEMS[name]
    except KeyError:
        raise UnsupportedError(
            f"no problem is called {name!r}; there are: {', '.join(PROBLEMS)}"
        ) from None
