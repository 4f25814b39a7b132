"""Part `machine`: what `ddp-launch doctor` says of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import gpu_part


def main() -> None:
    command = [sys.executable, "-m", "launcher", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    report = json.loads(done.stdout)
    about_gpus = [check for check in report["checks"] if "GPU" in check["name"]]
    for check in about_gpus:
        # A warning is about this machine; a check that fails here would stop a job.
        detail = {key: value for key, value in check.items() if key != "name"}
        gpu_part.found("check", name=f"doctor: {check['name']}", ok=check["grade"] != "fail", detail=detail)
    if gpu_part.DEVICE == "cuda":
        seen = any(check["name"] == "GPUs" and check["grade"] == "ok" for check in about_gpus)
        gpu_part.found("check", name="doctor sees the GPUs", ok=seen, detail=report.get("versions", {}))


if __name__ == "__main__":
    main()
