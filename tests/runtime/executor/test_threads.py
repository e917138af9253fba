import os
from pathlib import Path

import pytest

from hearth.runtime.executor.threads import physical_cores


def _topology(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text)
    return folder


def test_hyper_threads_of_one_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    topology = _topology(tmp_path, {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"})
    assert physical_cores(topology) == 2


def test_only_allowed_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    assert physical_cores(_topology(tmp_path, {0: "0", 2: "2"})) == 1


def test_without_a_topology_every_processor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert physical_cores(tmp_path) == 3
