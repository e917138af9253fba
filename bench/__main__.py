"""`python -m bench` is `hearth bench`."""

from hearth.daemon.cli import LazyCommand, LazyGroup
from hearth.daemon.cli.errors import run_and_exit

_COMMANDS = {
    "decode": LazyCommand(
        "hearth.bench.decode.command:decode", "Decode speed beside the peers and the memory floor."
    ),
    "overhead": LazyCommand(
        "hearth.bench.overhead:overhead", "What the daemon adds to the in-process loop."
    ),
    "load": LazyCommand("hearth.bench.load:load", "Many clients; every token is checked."),
    "memory": LazyCommand(
        "hearth.bench.memory:memory", "Memory by part, predicted against measured."
    ),
    "spec": LazyCommand(
        "hearth.bench.spec.command:spec", "Speculation beside plain decoding, and its proof."
    ),
    "prefix": LazyCommand(
        "hearth.bench.prefix:prefix",
        "Prompts that begin alike, with the prefix cache and without.",
    ),
    "lora": LazyCommand(
        "hearth.bench.lora:lora", "Steps with adapters and without, and switches between them."
    ),
    "structured": LazyCommand(
        "hearth.bench.structured.command:structured",
        "What grammars cost, and whether replies follow them.",
    ),
    "vision": LazyCommand(
        "hearth.bench.vision.command:vision", "Pictures by stage, beside transformers."
    ),
    "clients": LazyCommand(
        "hearth.bench.clients.command:clients", "What clients of each language cost, beside gRPC."
    ),
}

# For one version; what they did needs the repository.
_MOVED = {name: f"make system ROW={name}" for name in ("faults", "overload", "soak")} | {
    name: f"python -m tools.{name}" for name in ("widths", "graphs")
}

bench = LazyGroup(
    name="bench",
    commands_by_name=_COMMANDS,
    elsewhere={
        name: f"it is `{command}` in the repository now" for name, command in _MOVED.items()
    },
    help="Measure this machine.\n\nEvery command prints a table, or with --json one object on the "
    "last line of standard output; progress goes to standard error.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
"""`hearth bench`: speed, overhead, correctness under load, memory."""


if __name__ == "__main__":
    run_and_exit(lambda: bench.main(prog_name="hearth bench", standalone_mode=False))
