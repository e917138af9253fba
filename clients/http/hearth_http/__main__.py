"""`python -m hearth_http` is the command."""

import sys

from hearth_http.command import main

sys.exit(main())
