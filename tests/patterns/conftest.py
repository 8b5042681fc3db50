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

    Called with ``fires``, the expected count of the module's PATTERN, or of each fusion that
    fires; no other may.
    """
    pattern = getattr(request.module, "PATTERN", None)
    counts = request.config.stash.setdefault(_COUNTS, {})

    def run(*args, fires: int | dict[str, int], **kwargs):
        report = harness.check(*args, **kwargs)
        expected = fires if isinstance(fires, dict) else {pattern: fires}
        total = counts.setdefault(request.node.nodeid, Counter(dict.fromkeys(expected, 0)))
        total.update(report.counts())
        assert report.counts() == {name: n for name, n in expected.items() if n}, report
        return report

    return run


def pytest_sessionfinish(session):
    path = os.environ.get("FUSEDBWD_COUNTS_FILE")
    if path:
        Path(path).write_text(json.dumps(session.config.stash.get(_COUNTS, {})))
