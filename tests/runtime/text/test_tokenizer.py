import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import models, pre_tokenizers

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import (
    RESPONSE_TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    write_config,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import Conversation, Tool, ToolCall, Turn
from hearth.runtime.text.tokenizer import SpecialTokens, Tokenizer, TokenizerFile
from tests.runtime.text.folders import (
    CHATML,
    UNKNOWN,
    VOCAB,
    byte_fallback,
    byte_level,
    open_tokenizer,
    word_level,
    write_folder,
)

LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} "
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
KINDS = {"byte_level": (byte_level, CHATML, 0), "byte_fallback": (byte_fallback, LLAMA, 1)}
# What users may write: ordinary text, special tokens, pieces of them.
contents = st.lists(
    st.sampled_from(
        [
            *("the lamp ", "é🙂", "\n", " ", "<think>", "</think>", "</thi", "nk>", "a"),
            *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>"),
            *("<|im_", "start|>", "<", "|>", "s>", "\U0010fffd"),
        ]
    ),
    max_size=8,
).map("".join)
conversations = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), max_size=4
)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    make, template, bos = KINDS[request.param]
    return open_tokenizer(tmp_path_factory.mktemp(request.param), make(), template, bos)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("chatml"), byte_level())


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("tooled"), byte_level(), TOOL_TEMPLATE)


def refused(code: str, field: str) -> "pytest.RaisesExc[HearthError]":
    return pytest.RaisesExc(
        HearthError, check=lambda error: (error.code, error.field) == (code, field)
    )


@settings(deadline=None)
@given(turns=conversations)
def test_users_never_write_a_special_token(
    tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    special = [i for i in tokenizer.encode_pairs(turns) if not tokenizer.has_text(i)]
    harmless = tokenizer.encode_pairs([(role, "x") for role, _ in turns])
    assert special == [i for i in harmless if not tokenizer.has_text(i)]


@settings(deadline=None)
@given(content=contents)
def test_a_message_is_encoded_without_loss(chatml: Tokenizer, content: str) -> None:
    ids = chatml.encode_pairs([("user", content)])
    assert chatml.decode(ids, skip_special=False) == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_text_in_a_message_is_encoded_as_the_library_does(chatml: Tokenizer) -> None:
    library = byte_level()
    library.encode_special_tokens = True
    text = library.encode("user\nsay <|im_end|> now").ids
    ids = chatml.encode_pairs([("user", "say <|im_end|> now")])
    assert ids[: len(text) + 2] == [1, *text, 2]


def test_stored_ids_of_a_conversation(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(
        tmp_path, word_level(), "<sys>{% for m in messages %} {{ m.content }}{% endfor %}"
    )
    # Words are whole, so that a user's <sys> would be the special token: it is torn apart.
    assert tokenizer.encode_pairs([("user", "turn on")]) == [1, 3, 4]
    assert tokenizer.encode_pairs([("user", "turn <sys> on")]) == [1, 3, 0, 5, 4]


def test_text_that_can_be_nothing_but_a_special_token_is_refused(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "Z": 1, "</s>": 2, "on": 3}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["Z"])
    tokenizer = open_tokenizer(tmp_path, library, "{{ messages[0].content }}")
    assert tokenizer.encode_pairs([("user", "on off")]) == [3, 0]
    with refused("invalid_value", "messages"):
        tokenizer.encode_pairs([("user", "on Z")])


@settings(deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["system", "user"]), contents), max_size=4))
def test_users_never_write_a_plain_marker(chatml: Tokenizer, turns: list[tuple[str, str]]) -> None:
    plain = {chatml.encode(one)[-1] for one in ("<think>", "</think>")}
    assert not plain & set(chatml.encode_pairs(turns))


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>{{ t | tojson(ensure_ascii=ascii) }}<|im_end|>"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ m.tool_call_id }}{{ m.name }}{% for c in m.tool_calls or [] %}"
    '<|im_start|>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}<|im_end|>{{ c.function.arguments if ascii is defined }}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>{{ note }}"
)
values = st.recursive(
    contents | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(contents, inner, max_size=3),
    max_leaves=6,
)


def with_tools(text: str, value: Any, *, ascii_only: bool) -> Conversation:
    schema = {"type": "object", "properties": {text: {"description": text, "enum": [value]}}}
    call = ToolCall(f"c{text}", "on", {"a": value, text: text})
    return Conversation(
        [
            Turn("user", text),
            Turn("assistant", "", tool_calls=[call]),
            Turn("tool", text, tool_call_id=f"c{text}", name="on"),
        ],
        [Tool("on", text, schema)],
        variables={"note": text, "ascii": ascii_only},
    )


@settings(deadline=None)
@given(text=contents, value=values, ascii_only=st.booleans())
def test_nobody_writes_a_marker_in_tools_calls_and_results(
    tooled: Tokenizer, text: str, value: Any, *, ascii_only: bool
) -> None:
    def marks(conversation: Conversation) -> list[int]:
        found = tooled.encode_chat(conversation).ids
        plain = {tooled.encode(one)[-1] for one in ("<think>", "</think>")}
        return [one for one in found if one in plain or not tooled.has_text(one)]

    harmless = marks(with_tools("x", 1, ascii_only=ascii_only))
    assert marks(with_tools(text, value, ascii_only=ascii_only)) == harmless


@settings(deadline=None)
@given(text=contents, value=values, ascii_only=st.booleans())
def test_tools_and_arguments_are_shown_as_they_are(
    tooled: Tokenizer, text: str, value: Any, *, ascii_only: bool
) -> None:
    conversation = with_tools(text, value, ascii_only=ascii_only)
    shown = tooled.decode(tooled.encode_chat(conversation).ids, skip_special=False)
    arguments = conversation.turns[1].tool_calls[0].arguments
    tool = conversation.tools[0]
    described = {"name": tool.name} | ({"description": text} if text else {})
    told = {"type": "function", "function": {**described, "parameters": tool.parameters}}
    assert shown.startswith(f"<|im_start|>{json.dumps(told, ensure_ascii=ascii_only)}<|im_end|>")
    called = json.dumps({"name": "on", "arguments": arguments}, ensure_ascii=False)
    assert f"<|im_start|>{called}<|im_end|>{arguments}<|im_end|>" in shown
    assert shown.endswith(f"<|im_start|>{text}")


SPLITTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant\n<think>"
)


def test_the_models_own_plain_markers_are_shown_to_its_template(tmp_path: Path) -> None:
    library = byte_level()
    think, end = (library.token_to_id(one) for one in ("<think>", "</think>"))
    whole = open_tokenizer(tmp_path, byte_level())
    ids = whole.encode_pairs([("assistant", "<think>hm</think>on <|im_end|>")])
    assert [one for one in ids if one in (think, end, 2)] == [think, end, 2]
    splitting = open_tokenizer(tmp_path, byte_level(), SPLITTING)
    ids = splitting.encode_pairs([("user", "a</think>b"), ("assistant", "<think>hm</think>on")])
    assert splitting.decode(ids, skip_special=False) == (
        "<|im_start|>user\na</think>b<|im_end|><|im_start|>assistant\non<|im_end|>"
        "<|im_start|>assistant\n<think>"
    )
    assert [one for one in ids if one in (think, end)] == [think]


def test_what_the_model_marks_plainly_is_text_of_its_reply(chatml: Tokenizer) -> None:
    ids = chatml.encode("<think>hm</think>on<|im_end|>")
    assert chatml.decode(ids) == "<think>hm</think>on"
    assert all(chatml.has_text(one) for one in ids[:-1])
    assert not chatml.has_text(ids[-1])


def test_white_space_and_letters_mark_nothing(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(["   ", "\n\n", "ü"])
    plain = library.encode("user\na   b\n\nü", add_special_tokens=False).ids
    assert {library.token_to_id(one) for one in ("   ", "\n\n", "ü")} <= set(plain)
    ids = open_tokenizer(tmp_path, library).encode_pairs([("user", "a   b\n\nü")])
    assert ids[1 : 1 + len(plain)] == plain


def test_a_text_at_which_the_library_panics_is_refused_alone(tmp_path: Path) -> None:
    library = byte_level()
    greedy = tokenizers.AddedToken("<m>", rstrip=True, normalized=False)
    library.add_tokens([greedy, tokenizers.AddedToken("\n\n", lstrip=True, normalized=False)])
    tokenizer = open_tokenizer(tmp_path, library)
    with pytest.raises(HearthError) as caught:
        tokenizer.encode("<m>\n\n  ")
    assert caught.value.code == "invalid_value"
    assert tokenizer.decode(tokenizer.encode("on the lamp")) == "on the lamp"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_marker_whose_text_is_normalised_is_guarded_too(tmp_path: Path, role: str) -> None:
    library = byte_fallback()
    library.add_tokens(["<tool>"])
    assert (tool := library.token_to_id("<tool>")) is not None
    template = "{{ messages[0].content }} on <tool> the"
    ids = open_tokenizer(tmp_path, library, template).encode_pairs([(role, "the <tool> the")])
    assert ids.count(tool) == (1 if role == "user" else 2)


def test_raw_prompts_recognise_special_tokens(chatml: Tokenizer) -> None:
    assert chatml.encode("<|im_start|>")[0] == 1
    assert chatml.encode("") == []


@pytest.mark.parametrize("text", ["so ", "[", "<|im", "é", "\0"])
def test_what_is_far_too_long_is_refused_by_its_beginning(
    chatml: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[int]()
    encode = chatml._library.encode_batch_fast

    def noted(texts: list[str], **options: Any) -> Any:
        encoded.append(len(texts[0]))
        return encode(texts, **options)

    library = SimpleNamespace(encode_batch_fast=noted)
    monkeypatch.setattr(chatml, "_library", library)
    with refused("prompt_too_long", "prompt"):
        chatml.encode(text * 100_000, most=10)
    with refused("prompt_too_long", "prompt"):
        chatml.encode_chat(Conversation([Turn("user", text * 100_000)]), 10)
    assert max(encoded) == 160
    # Without a limit, and just above it, all is told.
    assert len(chatml.encode(text * 1000)) >= 1000
    assert chatml.encode(text * 20, most=10) == chatml.encode(text * 20)


def test_a_cut_through_a_long_token_makes_no_text_too_long(tmp_path: Path) -> None:
    library = byte_level()
    library.add_special_tokens(["=" * 50])
    tokenizer = open_tokenizer(tmp_path, library)
    assert len(tokenizer.encode("=" * 50 * 8, most=8)) == 8


def test_raw_prompts_get_what_the_tokenizer_file_adds_and_chats_do_not(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, byte_fallback(), LLAMA, bos=1)
    assert tokenizer.encode("the").count(1) == 1
    assert tokenizer.encode_pairs([("user", "the")]).count(1) == 1


def test_conversations_with_tools_have_their_template_and_format(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / TOOL_TEMPLATE_FILE).write_text(
        "{{ tools | map(attribute='function.name') | join }}: <tool>{{ messages[0].content }}"
    )
    replies = {"fields": {"content": {}, "thinking": {"open": "<tool>", "close": "</tool>"}}}
    (tmp_path / RESPONSE_TEMPLATE_FILE).write_text(json.dumps(replies))
    tokenizer = Tokenizer.open(tmp_path)
    chat = tokenizer.encode_chat(Conversation([Turn("user", "")], [Tool("a"), Tool("a/b")]))
    assert tokenizer.decode(chat.ids) == "aa/b: <tool>"
    assert chat.in_reasoning
    assert not tokenizer.encode_chat(Conversation([Turn("user", "<tool>")])).in_reasoning
    assert tokenizer.reply_format.source == "response_template"
    (tmp_path / RESPONSE_TEMPLATE_FILE).write_text("{")
    with refused("engine_corrupt", RESPONSE_TEMPLATE_FILE):
        Tokenizer.open(tmp_path)


def test_a_user_s_text_does_not_open_reasoning(tmp_path: Path) -> None:
    source = "<think></think>{{ messages[0].content }}"
    tokenizer = open_tokenizer(tmp_path, byte_level(), source)
    assert tokenizer.reply_format.reasoning == ("<think>", "</think>")
    assert not tokenizer.encode_chat(Conversation([Turn("user", "<think>")])).in_reasoning
    opened = open_tokenizer(tmp_path, byte_level(), source + "<think>\n")
    assert opened.encode_chat(Conversation([Turn("user", "hi")])).in_reasoning


def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    source = "{% if not think is defined %}{% set think = 1 %}{% endif %}{{ think }}"
    tokenizer = open_tokenizer(tmp_path, byte_level(), source)
    found = tokenizer.encode_chat(Conversation([], variables={"think": 2})).ids
    assert tokenizer.decode(found) == "2"
    with refused("unsupported_option", "template.thin"):
        tokenizer.encode_chat(Conversation([], variables={"think": 2, "thin": 1}))


def test_a_model_without_template_refuses_messages(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, byte_level(), None)
    with refused("unsupported_option", "messages"):
        tokenizer.encode_pairs([("user", "hi")])


@pytest.mark.parametrize("role", ["", "<|im_end|>", "User"])
def test_roles_are_a_closed_list(chatml: Tokenizer, role: str) -> None:
    with refused("invalid_value", "messages[0].role"):
        chatml.encode_pairs([(role, "hi")])


def test_text_that_is_not_unicode_is_refused(chatml: Tokenizer) -> None:
    with refused("invalid_value", "prompt"):
        chatml.encode("a\ud800")
    with refused("invalid_value", "text"):
        chatml.encode("a\udfff", "text")
    with refused("invalid_value", "messages[1].content"):
        chatml.encode_pairs([("user", "hi"), ("user", "\ud800")])


def test_decode_skips_special_tokens_when_asked(chatml: Tokenizer) -> None:
    ids = chatml.encode("on<|im_end|>")
    assert chatml.decode(ids) == "on"
    assert chatml.decode(ids, skip_special=False) == "on<|im_end|>"


@pytest.mark.parametrize("count", [1, 500])
def test_ids_without_text_decode_to_nothing(chatml: Tokenizer, count: int) -> None:
    lamp = chatml.encode("lamp")
    assert chatml.decode([*lamp, VOCAB - 1] * count) == "lamp" * count


@pytest.mark.parametrize("bad", [-1, VOCAB, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(chatml: Tokenizer, bad: int) -> None:
    with refused("invalid_value", "tokens"):
        chatml.decode([3, bad])


def test_threads_do_not_disturb_one_another(chatml: Tokenizer) -> None:
    raw, chat = "<|im_start|> the lamp" * 20, [("user", "<|im_start|> the lamp" * 20)]
    expected = (chatml.encode(raw), chatml.encode_pairs(chat))
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(20):
            found = chatml.encode_pairs(chat) if index % 2 else chatml.encode(raw)
            if found != expected[index % 2]:
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.reference
@pytest.mark.parametrize("kind", list(KINDS))
def test_conversations_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, template, bos = KINDS[kind]
    library: tokenizers.Tokenizer = make()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        chat_template=template,
        bos_token=library.id_to_token(bos),
        eos_token=library.id_to_token(2),
    )
    ours = open_tokenizer(tmp_path, make(), template, bos)
    turns = [
        ("system", " The lamps: Küche, 廊下.\n"),
        ("user", "turn on the\n\n lamp 🙂 <b>now</b>"),
        ("assistant", "<think>\n\n</think>\n\nok."),
        ("user", "thanks "),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ours.encode_pairs(turns) == expected
    assert ours.encode("the lamp") == theirs("the lamp")["input_ids"]
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def special_tokens(library: tokenizers.Tokenizer, unknown: int | None = None) -> SpecialTokens:
    return SpecialTokens(library, library.get_vocab_size(), unknown)


def encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


def test_the_template_s_tokens_become_ids_and_the_user_s_stay_text() -> None:
    library = byte_level()
    special = special_tokens(library)
    cloak = special.escape()
    rendered = "<|im_start|>user\n" + cloak.hide("a<|im_start|>b") + "<|im_end|>"
    ids = special.real_ids(encode(library, special.spell(rendered, cloak, torn=False)))
    assert ids is not None
    assert [i for i in ids if i in special.ids] == [1, 2]
    assert library.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\na<|im_start|>b<|im_end|>"
    )


def test_text_that_became_special_is_noticed_and_torn() -> None:
    library = word_level()
    special = special_tokens(library, unknown=0)
    cloak = special.escape()
    rendered = "<sys> " + cloak.hide("turn <sys> on")
    whole = encode(library, special.spell(rendered, cloak, torn=False))
    assert special.real_ids(whole) is None
    torn = encode(library, special.spell(rendered, cloak, torn=True))
    assert special.real_ids(torn) == [1, 3, 0, 5, 4]


def test_white_space_rules_are_kept() -> None:
    library = byte_level()
    library.add_special_tokens([tokenizers.AddedToken("<eat>", lstrip=True, rstrip=True)])
    library.encode_special_tokens = False
    plain = library.encode("a <eat> b").ids
    special = special_tokens(library)
    spelled = special.spell("a <eat> b", special.escape(), torn=False)
    assert special.real_ids(encode(library, spelled)) == plain


def test_single_words_are_special_between_other_characters_alone() -> None:
    library = byte_level()
    library.add_special_tokens([tokenizers.AddedToken("stop", single_word=True)])
    special = special_tokens(library)
    text = "stop unstoppable stop."
    library.encode_special_tokens = False
    plain = library.encode(text).ids
    spelled = special.spell(text, special.escape(), torn=False)
    assert special.real_ids(encode(library, spelled)) == plain


def test_a_tokenizer_without_special_tokens_is_served() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106 - no password
    special = special_tokens(library)
    spelled = special.spell("<s>", special.escape(), torn=False)
    assert (spelled, special.ids) == ("<s>", frozenset())


def test_gaps_in_the_ids_are_refused() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))  # noqa: S106 - no password
    with pytest.raises(HearthError) as caught:
        SpecialTokens(library, 6, None)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "tokenizer.json")


def opening_fails(folder: Path, code: str, name: str) -> None:
    with pytest.raises(HearthError) as caught:
        Tokenizer.open(folder)
    assert (caught.value.code, caught.value.field) == (code, name)
    assert name in caught.value.message


def test_size_and_unknown_token(tmp_path: Path) -> None:
    file = TokenizerFile.read(write_folder(tmp_path, word_level()))
    assert (file.size, file.unknown) == (7, 0)
    file = TokenizerFile.read(write_folder(tmp_path, byte_level()))
    assert (file.size, file.unknown) == (file.library.get_vocab_size(), None)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_tokenizer_is_refused(tmp_path: Path, keep: int) -> None:
    folder = write_folder(tmp_path, byte_level())
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[]", b"null", b'{"model": {"type": "Nope"}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer.json").write_bytes(data)
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer.json").unlink()
    opening_fails(folder, "engine_corrupt", "tokenizer.json")


def test_more_tokens_than_the_model_has_are_refused(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    Tokenizer.open(write_folder(tmp_path, byte_level(), vocab_size=size))
    folder = write_folder(tmp_path, byte_level(), vocab_size=size - 1)
    opening_fails(folder, "tokenizer_mismatch", "tokenizer.json")


def test_an_end_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), eos=399)
    opening_fails(folder, "tokenizer_mismatch", "tokenizer.json")


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    opening_fails(folder, "engine_corrupt", "chat_template.jinja")


@pytest.mark.parametrize(("older", "bos"), [(False, "<think>"), (True, "<|endoftext|>")])
def test_token_variables_are_those_that_were_exported(
    tmp_path: Path, *, older: bool, bos: str
) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    folder = write_folder(tmp_path, byte_level(), source, bos=0)
    tokens = {"bos_token": "<think>", "eos_token": "<|im_end|>"}
    # Format 1 has none: they follow from the ids of the model.
    changes: dict[str, Any] = {"engine_format": 1} if older else {}
    write_config(folder, structs.replace(load_config(folder), template_tokens=tokens, **changes))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.decode(tokenizer.encode_pairs([]), skip_special=False) == f"{bos}|<|im_end|>|"


def test_limits_from_training_do_not_cut_or_pad(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    tokenizer = Tokenizer.open(write_folder(tmp_path, library))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["truncation"] is not None
    assert tokenizer.decode(tokenizer.encode("the lamp is on")) == "the lamp is on"
    assert len(tokenizer.encode("x")) == 1
