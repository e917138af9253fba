import pytest

from bench.load_command import split_jobs
from bench.load_messages import LoadJob

COMMON = LoadJob(socket="s", engine="e", clients=0, requests=0, max_tokens=64, seed=0)


@pytest.mark.parametrize(
    ("requests", "clients", "processes"), [(10_000, 32, 4), (10, 7, 3), (2, 4, 4)]
)
def test_nothing_is_lost_in_the_split(requests: int, clients: int, processes: int) -> None:
    jobs = split_jobs(COMMON, requests, clients, processes)
    assert sum(job.requests for job in jobs) == requests
    assert sum(job.clients for job in jobs) == clients
    assert min(job.clients for job in jobs) >= 1
    assert len({job.seed for job in jobs}) == processes
    assert {(job.socket, job.max_tokens) for job in jobs} == {("s", 64)}
