"""`python -m bench` is `hearth bench`."""

from bench.commands import bench
from daemon.cli.errors import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: bench.main(prog_name="hearth bench", standalone_mode=False))
