"""The rendered manifests run where containers cannot: as processes in the network lab."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from processes import Processes, what_is_missing
from scenario import play

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "-"),
    pytest.mark.timeout(600),  # on a busy machine; half a minute on an idle one
]


@pytest.mark.nightly(instead=("deploy/test_manifests.py", "deploy/test_etcd_members.py"))
def test_a_job_goes_on_while_all_around_it_changes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    engine = Processes(tmp_path)
    try:
        play(engine, tmp_path, partial(record_property, "manifests"))
    finally:
        engine.close()
