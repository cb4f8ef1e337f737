"""Runs `python -m ragged.conformance`."""

import sys

from ragged.conformance import main

sys.exit(main())
