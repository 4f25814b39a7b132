"""`make gpu-docs`: writes the results of `make gpu` into docs/performance.md and docs/faults.md.

gpu_docs.py [FILE]            default: gpu-results/gpu.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_floor  # noqa: F401  first: it refuses a Python that cannot read the others
import gpu_page
import gpu_results

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    (ROOT / "docs" / "performance.md", "gpu", gpu_page.performance),
    (ROOT / "docs" / "faults.md", "gpu-faults", gpu_page.faults),
)


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "gpu-results" / "gpu.json"
    try:
        results = gpu_results.read(path)
    except gpu_results.WrongResults as error:
        print(f"gpu-docs: {error}", file=sys.stderr)
        return 2
    if results is None:
        print(
            f"gpu-docs: {path} does not exist. Run `make gpu` on a machine with a GPU first", file=sys.stderr
        )
        return 2
    if results.rehearsal:
        print(
            f"gpu-docs: {path} is of a rehearsal, whose figures mean nothing; docs/ is unchanged",
            file=sys.stderr,
        )
        return 2
    new = [(page, replaced(page.read_text(), name, text(results))) for page, name, text in PLACES]
    for page, text in new:  # both or none
        page.write_text(text)
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


def replaced(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found_begin, rest = page.partition(begin)
    _old, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"the page has no place for this text: {begin} and {end} are missing")
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
