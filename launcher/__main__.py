"""`python -m launcher` is `ddp-launch`."""

import sys

from launcher.cli import main

sys.exit(main())
