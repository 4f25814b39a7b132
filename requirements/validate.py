"""Holds bills of materials against the schema of CycloneDX. Runs where requirements/tools.txt is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

bad = 0
for name in sys.argv[1:]:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(Path(name).read_text())
    sys.stdout.write(f"{name}: {'valid' if error is None else error}\n")
    bad += error is not None
sys.exit(bad > 0)
