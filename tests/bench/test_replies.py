import subprocess
import sys

PROGRAM = """
import os
from bench.replies import Replies
replies = Replies()
print("noise", flush=True)
os.write(1, b"more noise")
replies.send({"a": 1})
replies.send("b")
"""


def test_what_is_printed_stays_apart_from_the_replies() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert done.stdout == b'{"a":1}\n"b"\n'
    assert done.stderr == b"noise\nmore noise"
