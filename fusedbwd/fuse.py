"""Joint graph → fused joint graph: the passes, and the record of what they did.

Each pattern runs as an Inductor ``PatternMatcherPass`` of its own. A match is rewritten only
if its proof holds; the composite ops that are left are then expanded as Inductor would have
expanded them while tracing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from fusedbwd import compat, gate
from fusedbwd.config import OPT_INS, Config
from fusedbwd.errors import FusionError
from fusedbwd.graph import (
    SAVED_KEY,
    ReadsLayout,
    depends_on,
    gradient_nodes,
    inline,
    relaid,
    same_size,
    stable_topological_sort,
    value,
)
from fusedbwd.limits import dtype_notes
from fusedbwd.patterns import PATTERNS, Miss, Pattern, Rewrite
from fusedbwd.patterns.algebra import strip
from fusedbwd.precision import concerns, in_force
from fusedbwd.report import Fired, Missed, Report
from fusedbwd.verify_rewrite import verify_rewrite

log = logging.getLogger("fusedbwd")


def fuse(graph: fx.Graph, config: Config) -> Report:
    """Applies every fusion that ``config`` switches on, then expands what is left.

    Args:
        graph: a joint graph with fake values in its metadata; changed in place.

    Raises:
        FusionError: ``config.strict`` and nothing was fused.
        VerificationError: ``config.verify`` and a rewrite disagreed with what it replaced.
    """
    report = Report(
        precisions=[in_force()] if concerns(graph) else [],
        notes=dtype_notes(gradient_nodes(graph)),
    )
    compat.remove_noop_ops(graph)
    for pattern in PATTERNS:
        if config.enabled(pattern.name):
            pattern_pass(graph, pattern, report, config)
        elif pattern.name not in OPT_INS:
            report.switched_off.append(pattern.name)
    expand_pass(graph)
    log.info("%s", report.summary())
    for miss in report.missed:
        log.debug("%s not fused at %s: %s", miss.fusion, miss.anchor, miss.reason)
    compat.trace_structured("fusedbwd_report", str(report))
    if config.strict and not report.fired:
        raise FusionError(f"strict: nothing was fused\n{report}")
    return report


def pattern_pass(graph: fx.Graph, pattern: Pattern, report: Report, config: Config) -> None:
    """Rewrites every proven match of ``pattern`` that pays, and adds to ``report``."""
    proven: dict[fx.Node, Rewrite] = {}

    def extra_check(match: Match) -> bool:
        node = match.output_node()
        try:
            rewrite = pattern.prove(match)
            if rewrite is not None:
                _check_order(rewrite)
                _check_saved(rewrite)
                if config.gate:
                    _check_pays(pattern, rewrite)
                proven[node] = rewrite
        except Miss as miss:
            report.missed.append(Missed(pattern.name, node.name, str(miss)))
        except Exception as fault:  # ours; the graph is as it was, and compiles without the fusion
            report.missed.append(Missed(pattern.name, node.name, _broken_off(fault)))
            log.warning("%s at %s: please report this", pattern.name, node.name, exc_info=True)
        return node in proven

    def handler(match: Match, *args: object, **kwargs: object) -> None:
        node = match.output_node()
        rewrite = proven.pop(node)
        if config.verify:
            verify_rewrite(pattern.name, rewrite)
        replaced = tuple(n.name for n in rewrite.outputs)
        anchor = node.name
        try:
            _apply(graph, rewrite, node)
        except Miss as miss:
            report.missed.append(Missed(pattern.name, anchor, str(miss)))
        else:
            report.fired.append(Fired(pattern.name, anchor, replaced))

    matcher = PatternMatcherPass(pass_name=f"fusedbwd_{pattern.name}")
    for anchor in pattern.anchors:
        register_graph_pattern(anchor, extra_check=extra_check, pass_dict=matcher)(handler)
    matcher.apply(graph)
    pattern.finish(graph)
    graph.lint()


BROKEN_OFF = "the proof broke off"


def _broken_off(fault: Exception) -> str:
    return f"{BROKEN_OFF}: {type(fault).__name__}: {fault}"


def expand_pass(graph: fx.Graph) -> None:
    """Expands the composite ops that tracing kept whole and no pattern took."""
    decompositions = compat.full_decompositions()
    matcher = PatternMatcherPass(pass_name="fusedbwd_expand")

    def handler(match: Match, *args: object, **kwargs: object) -> None:
        node = match.output_node()
        decomposition = decompositions[node.target]
        new = inline(
            graph,
            lambda *a: decomposition(*a, **node.kwargs),
            node.args,
            before=node,
            decompositions=decompositions,
        )
        _redirect(node, new)

    for op in compat.KEPT_WHOLE:
        if op in decompositions:
            register_graph_pattern(CallFunctionVarArgs(op), pass_dict=matcher)(handler)
    matcher.apply(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _redirect(node: fx.Node, new: list[fx.Node]) -> None:
    """Hands ``node``'s users over to ``new``, and removes it."""
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(new[0])
    else:
        for item in list(node.users):
            item.replace_all_uses_with(new[item.args[1]])
            item.graph.erase_node(item)
    node.graph.erase_node(node)


def _check_order(rewrite: Rewrite) -> None:
    """A fused op computes all outputs at once, so no operand may need one of them."""
    for operand in rewrite.operands:
        if isinstance(operand, fx.Node) and depends_on([operand], rewrite.outputs):
            raise Miss(f"its operand {operand.name} is computed from one of its results")


def _check_saved(rewrite: Rewrite) -> None:
    """What a schema saves is used as given: a fused op may not compute it again from others."""
    saved = {}
    for node in rewrite.outputs[0].graph.nodes:
        if SAVED_KEY in node.meta:  # a view or rounding of it is as good
            saved[node] = saved[strip(node)] = node.meta[SAVED_KEY]
    if not saved:
        return

    def first_read(nodes: Iterable, seen: Iterable[fx.Node]) -> set[str]:
        names, seen, todo = set(), set(seen), [n for n in nodes if isinstance(n, fx.Node)]
        while todo:
            node = todo.pop()
            if node in saved:
                names.add(saved[node])
            elif node not in seen and not isinstance(value(node), torch.SymInt):
                seen.add(node)
                todo.extend(node.all_input_nodes)
        return names

    unread = first_read(rewrite.outputs, rewrite.sources) - first_read(rewrite.operands, ())
    if unread:
        raise Miss(f"it would not read {', '.join(sorted(unread))}, saved for the backward to read")


def _check_pays(pattern: Pattern, rewrite: Rewrite) -> None:
    """A fusion that loses to Inductor's own code is not made."""
    result = value(rewrite.outputs[0])
    width = rewrite.width or result.shape[-1]
    if isinstance(width, int) and width > 0:
        verdict = gate.verdict(pattern.name, width, result.dtype, result.device)
        if not verdict.pays:
            raise Miss(verdict.reason)


def _apply(graph: fx.Graph, rewrite: Rewrite, anchor: fx.Node) -> None:
    try:
        new = inline(
            graph,
            rewrite.replacement,
            rewrite.operands,
            before=anchor,
            decompositions=compat.decompositions(),
        )
    except Exception as fault:  # while tracing: the graph is as it was
        log.warning("the fused op for %s: please report this", anchor.name, exc_info=True)
        raise Miss(_broken_off(fault)) from fault
    for old, node in zip(rewrite.outputs, new, strict=True):
        was, now = value(old), value(node)
        if was.dtype != now.dtype or not same_size(was.shape, now.shape):
            graph.eliminate_dead_code()
            raise Miss(
                f"the fused op gives {now.dtype} {list(now.shape)} for {old.name}, "
                f"which is {was.dtype} {list(was.shape)}"
            )
    pairs = list(zip(rewrite.outputs, new, strict=True))
    changed = {
        old: value(n) for old, n in pairs if not same_size(value(old).stride(), value(n).stride())
    }
    try:
        following = relaid(graph, changed)
    except ReadsLayout as read:
        graph.eliminate_dead_code()
        raise Miss(
            f"{read.node.name} may read how its operand lies, and the fused op's lies otherwise"
        ) from None
    for node in following:
        node.apply()
    for old, node in pairs:
        old.replace_all_uses_with(node)
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
