"""Run a daemon with a shipped model in a folder until standard input ends; says when it is ready.

`python daemon.py home FOLDER` in the daemon's own environment, which ROS's environments are not.
"""

import sys
from pathlib import Path

from hearth.daemon.own_daemon import OwnDaemon
from hearth.daemon.shipped import engine_folder, vision_engine_folder

model, folder = sys.argv[1:]
engine = vision_engine_folder() if model == "home-vision" else engine_folder("")
daemon = OwnDaemon(Path(folder), engine)
try:
    daemon.wait_until_ready()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    daemon.stop()
finally:
    daemon.kill()
