"""The frames of native code of a rank, read from outside by a tool of the node: py-spy, eu-stack or gdb.

The rank stands still while the tool reads it, for a fraction of a second up to a few seconds with gdb. So this is done
only when somebody asks for it. A hang inquiry has a shorter limit (`launcher.health.stacks`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from launcher.health.stack_tools import find

_BUDGET_S = 25.0  # gdb reads the symbols of torch
_LARGEST = 160 * 1024
_SHOWN_ERROR = 400
_TOOLS = (
    ("py-spy", ("dump", "--native", "--pid", "{pid}")),
    ("eu-stack", ("-n", "64", "-p", "{pid}")),
    (
        "gdb",
        (
            "-nx",
            "-q",
            "-batch",
            "-iex",
            "set debuginfod enabled off",
            "-ex",
            "thread apply all bt 64",
            "-p",
            "{pid}",
        ),
    ),
)
_NONE = (
    "no native frames: this node has no tool that reads them. Install one of py-spy "
    '(`pip install "ddp-launch[stacks]"`), elfutils (eu-stack) or gdb on it'
)


async def native_stacks(pid: int) -> str:
    """The frames as the first tool that succeeds prints them, or why there are none."""
    problems = []
    for name, words in _TOOLS:
        path = find(name)
        if path is None:
            continue
        text, problem = await _run(path, [word.format(pid=pid) for word in words])
        if text:
            return f"native frames, by {name}:\n{text}"
        problems.append(f"{name}: {problem}")
    return "; ".join(("no native frames", *problems)) if problems else _NONE


async def _run(path: str, words: list[str]) -> tuple[str, str]:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            path, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return "", error.strerror or str(error)
    try:
        out, err = await asyncio.wait_for(process.communicate(), _BUDGET_S)
    except TimeoutError:
        return "", f"took longer than {_BUDGET_S:g} s"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = out.decode(errors="replace").strip()
    if process.returncode == 0 and ("#0" in text or "Thread" in text):
        return text[:_LARGEST], ""
    said = " ".join((err or out).decode(errors="replace").split())
    return "", f"exit code {process.returncode}: {said[-_SHOWN_ERROR:]}"
