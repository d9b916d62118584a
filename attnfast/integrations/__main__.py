"""``python -m attnfast.integrations``."""

import sys

from attnfast.integrations.check import main

sys.exit(main())
