"""`python -m daemon.bench` is `hearth bench`."""

import sys

from daemon.bench.commands import bench
from daemon.cli.errors import exit_code_of, report

if __name__ == "__main__":
    try:
        sys.exit(bench.main(prog_name="hearth bench", standalone_mode=False))
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        if code is None:
            raise
        report(error)
        sys.exit(code)
