"""The test scripts that come with accelerate: `accelerate_own.py NAME`."""

import os
import runpy
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"
runpy.run_module(f"accelerate.test_utils.scripts.{sys.argv[1]}", run_name="__main__")
