from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bench.json_process import JsonProcess
from runtime.errors import HearthError

ROOT = str(Path(__file__).parents[2])


@contextmanager
def talker(folder: Path, words: str, then: str) -> Iterator[JsonProcess]:
    process = JsonProcess("tests.bench.talker", [words, then], folder / "log", {"PYTHONPATH": ROOT})
    with closing(process):
        yield process


def test_lines_go_both_ways_and_may_come_in_one_piece(tmp_path: Path) -> None:
    with talker(tmp_path, "1\n2\n", "echo") as process:
        assert [process.receive(20), process.receive(20)] == [b"1", b"2"]
        process.send({"a": [1]})
        assert process.receive(20) == b'{"a":[1]}'


def test_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.json_process._CLOSE_TIMEOUT_S", 0.1)
    silence = pytest.raises(HearthError, match=r"has said nothing for 0\.3 s")
    with talker(tmp_path, "half a line", "hang") as process, silence:
        process.receive(0.3)


def test_the_end_of_the_process_is_told_with_its_log(tmp_path: Path) -> None:
    with talker(tmp_path, "", "end") as process:
        with pytest.raises(HearthError, match=f"has ended: see {tmp_path}/log"):
            process.receive(20)
        with pytest.raises(HearthError, match="has ended"):
            send_for_ever(process)


def send_for_ever(process: JsonProcess) -> None:
    # The first line may still fit into the pipe of a process that has just ended.
    while True:
        process.send({})
