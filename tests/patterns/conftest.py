"""Counts how often each fusion fires, for the comparison between torch versions."""

import json
import os
from collections import Counter
from pathlib import Path

import harness
import pytest

_COUNTS = pytest.StashKey[dict]()


@pytest.fixture
def check(request):
    """:func:`harness.check`, which also asserts how often each fusion fires.

    Called with ``fires``, the expected count of the module's PATTERN; none may fire but those
    in ``others``, a number of times each.
    """
    pattern = request.module.PATTERN
    counts = request.config.stash.setdefault(_COUNTS, {})

    def run(*args, fires: int, others: dict[str, int] | None = None, **kwargs):
        report = harness.check(*args, **kwargs)
        total = counts.setdefault(request.node.nodeid, Counter({pattern: 0}))
        total.update(report.counts())
        expected = ({pattern: fires} if fires else {}) | (others or {})
        assert report.counts() == expected, report
        return report

    return run


def pytest_sessionfinish(session):
    path = os.environ.get("FUSEDBWD_COUNTS_FILE")
    if path:
        Path(path).write_text(json.dumps(session.config.stash.get(_COUNTS, {})))
