"""Worker: a contender that is timed over pictures in a process of its own, with its own threads."""

import os
import time
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from hearth.bench.child_process import ChildProcess, ParentProcess, family_usage
from hearth.bench.contenders.contender import Device, open_class
from hearth.runtime.errors import HearthError

Work = Literal["patches", "torchvision", "first_token"]
"""Work on a file: to the tower's input by the fastest processor or torchvision's, or to a token."""
_LOAD_TIMEOUT_S = 120.0
_LOOK_TIMEOUT_S = 60.0
_CLASSES = {
    "hearth": "hearth.bench.vision.hearth_pictures:HearthPictures",
    "transformers": "hearth.bench.vision.transformers_pictures:TransformersPictures",
}


class PictureJob(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a contender: an engine folder, or that of a checkpoint."""

    contender: Literal["hearth", "transformers"]
    path: str
    device: Device = "cpu"
    threads: int = 1
    precision: str = "float32"


class Look(msgspec.Struct, frozen=True):
    """Do this with a picture's file, which is read before the time begins, and a question."""

    work: Work
    file: str
    text: str = ""


class Looked(msgspec.Struct, frozen=True, tag=True):
    """The seconds that it took, the token that came of it, and the process's memory in bytes.

    At first, when the contender is open, what it can do.
    """

    seconds: float = 0.0
    token: int = 0
    rss_bytes: int = 0
    gpu_bytes: int = 0
    works: list[Work] = []


class PictureContender(Protocol):
    """Contender that a worker drives."""

    works: list[Work]

    def do(self, work: Work, data: bytes, text: str) -> int:
        """Do a piece of work; the token, 0 where none comes of it."""

    def gpu_bytes(self) -> int:
        """Bytes that its library has taken of the GPU's memory, the context apart."""


class PictureWorker:
    """A contender, open when the constructor returns; what its libraries print goes to `log`.

    Raises HearthError where it cannot run.
    """

    def __init__(self, job: PictureJob, log: Path) -> None:
        threads = str(job.threads)
        environ = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = ChildProcess("hearth.bench.vision.worker", job, log, environ)
        try:
            ready: Looked = self._process.receive(Looked, _LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.works = ready.works

    def look(self, work: Work, file: Path, text: str = "") -> Looked:
        """Do a piece of work; raises HearthError when nothing comes of it in time."""
        self._process.send(Look(work, str(file), text))
        looked: Looked = self._process.receive(Looked, _LOOK_TIMEOUT_S)
        return looked

    def close(self) -> None:
        """End the process."""
        self._process.close()


def main() -> None:
    """Serve as the child: open the job's contender, then answer each `Look`."""
    parent = ParentProcess()
    try:
        job: PictureJob = parent.job(PictureJob)
        contender: PictureContender = open_class(_CLASSES[job.contender], job, "peer")
        parent.send(Looked(works=contender.works))
        while (look := parent.receive(Look)) is not None:
            data = Path(look.file).read_bytes()
            started = time.perf_counter()
            token = contender.do(look.work, data, look.text)
            seconds = time.perf_counter() - started
            used = family_usage(os.getpid()).rss_bytes
            parent.send(Looked(seconds, token, used, contender.gpu_bytes()))
    except HearthError as error:
        parent.refuse(error)


if __name__ == "__main__":
    main()
