"""Set up the environment of this checkout: `make` calls it when something is missing.

This file must parse on any Python, however old, so that an old one gets a sentence instead of a
syntax error. The work is done in environment.py.
"""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit(
        "msdg-vllm needs Python 3.11 to 3.14, but %s is Python %d.%d; "
        "install one of those and name it, for example: make serve PYTHON=python3.12"
        % ((sys.executable,) + sys.version_info[:2])
    )

from environment import main

sys.exit(main())
