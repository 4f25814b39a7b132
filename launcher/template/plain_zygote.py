"""The plain zygote: the same loop in a small interpreter, for ranks that are executed instead of forked warm."""

import json
import os
import socket
import sys


def _main() -> None:
    package = type(sys)("_ddp_launch")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["_ddp_launch"] = package
    from _ddp_launch import forking, loop

    config = json.loads(sys.argv[1])
    forking.close_inherited(config["fd"])
    control = socket.socket(fileno=config["fd"])
    loop.Loop(control, warm=False).serve(config["cgroup"], config["scratch"])


_main()
