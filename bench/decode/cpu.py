"""`hearth bench decode` on the CPU: one greedy row, beside the peers and the memory-read floor."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median

import msgspec
from msgspec import structs

from hearth.bench.contenders.contender import Job, missing
from hearth.bench.contenders.floor import KERNELS, PASSES, plain_passes, repeats
from hearth.bench.decode.cases import Artifacts, Case
from hearth.bench.decode.contest import Contest, prompt_ids

SHARE_LIMIT = 1.02
"""A share of the floor above this says that the floor was not measured well."""
_WARM_UP = 3


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts to measure: `rounds` of a case's steps by each contender, in turns.

    `precision` is that of transformers when it is known, `spin` None for Hearth's default, `steps`
    those of the case unless given.
    """

    threads: int
    rounds: int = 7
    steps: int | None = None
    precision: str = ""
    spin: bool | None = None


class DecodeFigures(msgspec.Struct, kw_only=True):
    """One case; ratios above 1 mean that Hearth is ahead, None that the peer did not run.

    `floor_share` is the floor's time over a step's, `plain_read_share` that of a plain read from
    one end to the other, which is no bound. `same_tokens` counts the leading tokens that
    a peer with the same float weights chose like Hearth.
    """

    tokens_per_s: float
    floor_share: float
    vs_transformers: float | None
    vs_llama_cpp: float | None
    step_ms: float
    floor_ms: float
    floor_gb_per_s: float
    plain_read_share: float
    plain_read_gb_per_s: float
    transformers_ms: float | None
    transformers_precision: str
    llama_cpp_ms: float | None
    tokens: int
    same_tokens: dict[str, int] = {}
    notes: list[str] = []

    @property
    def credible(self) -> bool:
        """True where no step was faster than memory allows."""
        return self.floor_share <= SHARE_LIMIT


def measure(case: Case, artifacts: Artifacts, plan: Plan, contest: Contest) -> DecodeFigures:
    """Run all contenders at the same context lengths in turns; absent peers are noted.

    Raises HearthError when Hearth itself cannot run.
    """
    steps = plan.steps or case.steps
    jobs = _jobs(case, artifacts, plan, _WARM_UP + plan.rounds * steps)
    # The passes of the floor are spread over the rounds, so that it sees the same machine.
    passes = -(-PASSES * len(KERNELS) // plan.rounds)
    with closing(contest):
        for name, job in jobs.items():
            if name in {"hearth", "floor"}:
                contest.enter(name, job)
            else:
                contest.invite({name: job})
        workers = contest.workers
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for name, worker in workers.items():
            worker.advance(len(KERNELS) if name == "floor" else _WARM_UP)
        for _ in contest.rounds(plan.rounds):
            for name, worker in workers.items():
                seconds[name] += worker.advance(passes if name == "floor" else steps)
    if artifacts.gguf is None:
        contest.notes.append(f"llama_cpp is left out: {missing(['gguf'])}")
    equal_weights = ("hearth", "transformers", "llama_cpp") if case.precision == "fp32" else ()
    return decode_figures(
        seconds,
        weight_bytes=artifacts.weight_bytes,
        tokens={name: workers[name].tokens for name in equal_weights if name in workers},
        precision=workers["transformers"].precision if "transformers" in workers else "",
        notes=contest.notes,
    )


def _jobs(case: Case, artifacts: Artifacts, plan: Plan, steps: int) -> dict[str, Job]:
    common = Job(contender="hearth", threads=plan.threads, prompt=prompt_ids(), steps=steps)
    precision = "float32" if case.precision == "fp32" else plan.precision
    source, size = str(artifacts.source), artifacts.weight_bytes
    jobs = {
        "hearth": structs.replace(common, path=str(artifacts.engine), spin=plan.spin),
        "transformers": structs.replace(
            common, contender="transformers", path=source, precision=precision
        ),
    }
    if artifacts.gguf is not None:
        gguf = str(artifacts.gguf)
        jobs["llama_cpp"] = structs.replace(common, contender="llama_cpp", path=gguf)
    return jobs | {"floor": structs.replace(common, contender="floor", bytes=size)}


def decode_figures(
    seconds: Mapping[str, Sequence[float]],
    *,
    weight_bytes: int,
    tokens: Mapping[str, Sequence[int]],
    precision: str,
    notes: Sequence[str],
) -> DecodeFigures:
    """Medians of the steps of each contender (seconds by name), the best of the floor's passes.

    `tokens` holds what each contender of equal weights said; the others are compared with "hearth".
    """
    said_here = tokens.get("hearth", ())
    middle = {name: median(times) for name, times in seconds.items()}
    peers = middle.get("transformers"), middle.get("llama_cpp")
    step = middle["hearth"]
    floor = min(seconds["floor"]) / repeats(weight_bytes)
    plain = min(plain_passes(seconds["floor"])) / repeats(weight_bytes)
    vs_transformers, vs_llama_cpp = (peer / step if peer else None for peer in peers)
    transformers_ms, llama_cpp_ms = (1000 * peer if peer else None for peer in peers)
    return DecodeFigures(
        tokens_per_s=1 / step,
        floor_share=floor / step,
        vs_transformers=vs_transformers,
        vs_llama_cpp=vs_llama_cpp,
        step_ms=1000 * step,
        floor_ms=1000 * floor,
        floor_gb_per_s=weight_bytes / floor / 1e9,
        plain_read_share=plain / step,
        plain_read_gb_per_s=weight_bytes / plain / 1e9,
        transformers_ms=transformers_ms,
        transformers_precision=precision,
        llama_cpp_ms=llama_cpp_ms,
        tokens=len(said_here),
        same_tokens={
            name: common_prefix(said_here, said)
            for name, said in tokens.items()
            if name != "hearth"
        },
        notes=list(notes),
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the leading elements that are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
