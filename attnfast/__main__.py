"""``python -m attnfast``."""

import sys

from attnfast.translate.cli import main

sys.exit(main())
