"""``python -m attnfast``."""

import sys

from attnfast.cli import main

sys.exit(main())
