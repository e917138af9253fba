"""The command `hearth generate`, and prompts as users give them."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
from msgspec import structs

from hearth.daemon.cli.console import err, out, print_call, printable, progress_bar
from hearth.daemon.cli.errors import FAILED, Failure, wrong_usage
from hearth.daemon.cli.local_prompts import (
    Answer,
    LocalPrompt,
    Prompt,
    conversation_with,
    encode_prompt,
    grammar_of,
    read_reply,
)
from hearth.daemon.cli.options import (
    json_option,
    sampling_options,
    schema_option,
    speculation_option,
    template_option,
    tool_option,
)
from hearth.daemon.shipped import engine_folder
from hearth.daemon.shipped_files import ADAPTERS, shipped_picture
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.grammar import check_schemas
from hearth.runtime.lora.adapter import other_base
from hearth.runtime.lora.stored import read_adapter
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import (
    GeneratedRow,
    GenerationRequest,
    GenerationResponse,
    RequestOptions,
    RowRequest,
    check_options,
)
from hearth.runtime.text.conversation import Conversation, ResponseFormat
from hearth.runtime.text.reply_grammar import enforced_schemas
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision.vision_runner import LocalEmbeddings


def parse_ids(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[list[int], ...]:
    """Token ids from values like `1,2,3`; a callback of an option."""
    return tuple(_ids(value) for value in values)


def _ids(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of token ids like 1,2,3") from error


def read_prompts(
    texts: Sequence[str], ids: Sequence[list[int]], file: TextIO | None
) -> list[Prompt]:
    """All prompts in the order texts, ids, file; standard input when none of them is given."""
    prompts: list[Prompt] = [*texts, *ids]
    if file is None and not prompts:
        if sys.stdin.isatty():
            raise click.UsageError("there is no prompt: give --prompt, --ids, --file or a pipe")
        file = sys.stdin
    if file is not None:
        prompts += _lines(file)
    if not prompts:
        raise click.UsageError("there is no prompt: the input is empty")
    return prompts


def _lines(file: TextIO) -> list[str]:
    try:
        lines = [line.rstrip("\r\n") for line in file if line.strip()]
        "".join(lines).encode()  # In some locales what is no text is let through in disguise.
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise Failure(f"{file.name} is not {error.encoding} text: convert it first") from error
    return lines


_MAX_TOKENS = 256


def _find_pictures(
    _ctx: click.Context, _param: click.Parameter, given: tuple[Path, ...]
) -> tuple[Path, ...]:
    files = tuple(map(shipped_picture, given))
    for file in files:
        if not file.is_file():
            raise click.BadParameter(f"there is no file {file}")
    return files


def _find_adapter(_ctx: click.Context, _param: click.Parameter, given: Path | None) -> Path | None:
    if given is None or given.is_dir():
        return given
    if str(given) not in ADAPTERS:
        raise click.BadParameter(f"there is no folder {given}")
    return ADAPTERS[str(given)]


@click.command()
@click.argument("engine", metavar="[ENGINE_DIR]", default="")
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; repeatable.")
@click.option("--ids", multiple=True, callback=parse_ids, metavar="1,2,3", help="A prompt as ids.")
@click.option("--file", type=click.File(), help="Prompts, one per line; - for standard input.")
@click.option("--chat", is_flag=True, help="Apply the chat template: prompts are user messages.")
@click.option("--system", metavar="TEXT", help="The system message; needs --chat.")
@click.option(
    "--image",
    "files",
    multiple=True,
    callback=_find_pictures,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A picture before each prompt; repeatable, needs --chat. scene.jpg comes with Hearth.",
)
@click.option(
    "--adapter",
    callback=_find_adapter,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Answer with this adapter, a folder as PEFT saves it, or spoken or careful.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Default 256, or what fits.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end token.")
@sampling_options
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same text.")
@click.option(
    "--logprobs",
    type=int,
    default=0,
    show_default=True,
    help="Likely alternatives to report for each token.",
)
@tool_option
@schema_option
@template_option
@speculation_option
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 for all cores.")
@click.option("--max-batch", type=click.IntRange(0, 1024), default=0, help="0 for what fits.")
@click.option("--weights", metavar="FILE", default="", help="Weights from hearth weights.")
@json_option
def generate(
    *,
    engine: str,
    texts: tuple[str, ...],
    ids: tuple[list[int], ...],
    file: TextIO | None,
    chat: bool,
    system: str | None,
    files: tuple[Path, ...],
    adapter: Path | None,
    threads: int,
    max_batch: int,
    weights: str,
    speculation: bool | None,
    as_json: bool,
    tools: list[dict[str, Any]],
    schema: Any,
    template: dict[str, Any],
    **options: Any,
) -> int:
    """Answer prompts with the engine in ENGINE_DIR, in this process and without a daemon.

    Without ENGINE_DIR the shipped model answers. Prompts come from --prompt, --ids, --file or
    standard input (one per line); several run together. With --json each prompt prints one line
    {"token_ids", "text", "logprobs", "finish_reason"}, the end token included, and of a
    conversation "reasoning" and "tool_calls" where there are some. --tool and --template need
    --chat.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if files and not chat:
        raise click.UsageError("--image needs --chat")
    for flag, given in (("--tool", tools), ("--template", template)):
        if given and not chat:
            raise click.UsageError(f"{flag} needs --chat")
    if ids and chat:
        raise click.UsageError("--ids are no message: leave --chat out")
    name = "" if adapter is None else adapter.resolve().name or "adapter"
    given = {name: value for name, value in options.items() if value is not None}
    given |= {"speculation": speculation, "adapter": name}
    with wrong_usage():
        check_options(RequestOptions(**given))
        conversation = conversation_with(system, tools, template) if chat else None
        form = None if schema is None else ResponseFormat("json_schema", schema=schema)
        check_schemas(enforced_schemas(conversation or Conversation([]), form))
    prompts = read_prompts(texts, ids, file)
    with progress_bar() as progress:
        folder = engine_folder(engine, progress)
    method = SpeculationOptions(method="off" if speculation is False else "auto")
    runtime_options = RuntimeOptions(
        threads=threads, max_batch=max_batch, weights=weights, speculation=method
    )
    store = LocalEmbeddings()
    images = None
    if files:
        # Whoever asks by text does without what decodes pictures.
        from hearth.daemon.cli.image_files import encode_files  # noqa: PLC0415 - see above

        images = encode_files(folder, files, store, threads)
    runtime = LLMInferenceRuntime.open(folder, runtime_options, embeddings=store)
    try:
        if runtime.chosen:
            err().print(runtime.chosen, style="dim", markup=False)
        if adapter is not None:
            read = read_adapter(adapter, runtime.config)
            runtime.load_adapter(name, read)
            if note := other_base(read.base, runtime.config):
                err().print(note, style="yellow", markup=False)
        tokenizer = Tokenizer.open(folder)
        # What is not given is the model's own.
        asked = RequestOptions(**{**runtime.config.sampling, **given})
        encoded = [
            encode_prompt(prompt, tokenizer, conversation)
            if images is None or conversation is None
            else images.prompt(tokenizer, str(prompt), conversation)
            for prompt in prompts
        ]
        rows = [
            _row(prompt, asked, grammar_of(tokenizer, prompt, form), runtime.capacity)
            for prompt in encoded
        ]
        show = _print_json if as_json else _print_text
        return _run(runtime, tokenizer, [*zip(encoded, rows, strict=True)], show)
    finally:
        runtime.close()


def _row(prompt: LocalPrompt, asked: RequestOptions, grammar: str, capacity: int) -> RowRequest:
    most = asked.max_tokens or max(1, min(_MAX_TOKENS, capacity - len(prompt.ids)))
    return RowRequest(
        token_ids=prompt.ids,
        prompt_length=len(prompt.ids),
        options=structs.replace(asked, max_tokens=most, grammar=grammar),
        images=[*prompt.images],
    )


def _run(
    runtime: LLMInferenceRuntime,
    tokenizer: Tokenizer,
    asked: list[tuple[LocalPrompt, RowRequest]],
    show: Callable[[GenerationResponse, list[Answer]], None],
) -> int:
    failed = False
    for start in range(0, len(asked), runtime.max_batch):
        some = asked[start : start + runtime.max_batch]
        request = GenerationRequest(rows=[row for _, row in some])
        response = runtime.handle_request(request, tokenizer)
        ends = runtime.config.eos_token_ids
        answers = [
            read_reply(tokenizer, prompt, row.options, told, ends)
            for (prompt, row), told in zip(some, response.rows, strict=True)
        ]
        show(response, answers)
        failed = failed or any(row.error for row in response.rows)
    return FAILED if failed else 0


def _print_json(_response: GenerationResponse, answers: list[Answer]) -> None:
    for answer in answers:
        fields = _fields(answer.row)
        if answer.reasoning:
            fields["reasoning"] = answer.reasoning
        if answer.calls:
            fields["tool_calls"] = [structs.asdict(call) for call in answer.calls]
        click.echo(msgspec.json.encode(fields))


def _fields(row: GeneratedRow) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "token_ids": row.token_ids,
        "text": row.text,
        "logprobs": row.logprobs,
        "finish_reason": row.finish_reason,
    }
    if any(row.top_logprobs):
        fields["top_logprobs"] = row.top_logprobs
    if row.error:
        fields["error"] = row.error
    return fields


def _print_text(response: GenerationResponse, answers: list[Answer]) -> None:
    for row, reasoning, calls in answers:
        if reasoning:
            err().print(printable(reasoning), style="dim", markup=False)
        out().print(printable(row.text), markup=False)
        for call in calls:
            print_call(call.name, call.arguments)
        if row.error:
            err().print(f"this prompt failed: {row.error}", style="red", markup=False)
    tokens = sum(len(row.token_ids) for row in response.rows)
    seconds = response.prefill_s + response.decode_s
    err().print(
        f"[dim]{tokens} tokens in {seconds:.2f} s, first after {response.prefill_s * 1000:.0f} ms,"
        f" {tokens / max(seconds, 1e-9):.0f} tokens/s[/]"
    )
