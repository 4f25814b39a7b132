"""The images of deploy/docker are really built, and the rendered manifests really run: by podman, as root."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from build_images import build_all
from containers import Containers, remove_leftovers, what_is_missing
from scenario import play

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "-"),
    pytest.mark.timeout(1800),
    pytest.mark.nightly(
        instead=("deploy/test_linters.py", "deploy/test_manifests.py")
    ),  # a base made of packages, and an image with torch: minutes
]


def test_a_job_goes_on_while_all_around_it_changes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    remove_leftovers()
    build_all()
    engine = Containers(tmp_path)
    try:
        play(engine, tmp_path, partial(record_property, "manifests"))
    finally:
        engine.close()
