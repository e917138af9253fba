import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from hearth.runtime.config import (
    CONFIG_FILE,
    DRAFT_ARCHITECTURE,
    FileRecord,
    LLMEngineRunnerConfig,
    load_config,
)
from hearth.runtime.engine_folder import (
    DATA_FILE,
    DRAFT_FOLDER,
    EMBEDDING_FILE,
    MODEL_FILE,
    REQUIRED_FILES,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    record_files,
    verify_folder,
    write_config,
)
from hearth.runtime.errors import HearthError
from tests.runtime.engine_configs import small_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in REQUIRED_FILES:
        (tmp_path / name).write_bytes(name.encode() * 100)
    return tmp_path


@pytest.fixture
def config(folder: Path) -> LLMEngineRunnerConfig:
    return msgspec.structs.replace(small_config(), files=record_files(folder))


def fault(folder: Path, config: LLMEngineRunnerConfig, *, digests: bool = True) -> HearthError:
    with pytest.raises(HearthError) as caught:
        verify_folder(folder, config, digests=digests)
    assert caught.value.code == "engine_corrupt"
    return caught.value


def test_records_hold_size_and_digest_of_everything_but_the_configuration(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{}")
    records = record_files(folder)
    assert set(records) == set(REQUIRED_FILES)
    data = MODEL_FILE.encode() * 100
    assert records[MODEL_FILE] == FileRecord(len(data), hashlib.sha256(data).hexdigest())


def test_a_written_configuration_reads_back_equal(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    write_config(folder, config)
    assert load_config(folder) == config


def test_an_untouched_folder_passes(folder: Path, config: LLMEngineRunnerConfig) -> None:
    verify_folder(folder, config, digests=True)


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_missing_file_is_named(folder: Path, config: LLMEngineRunnerConfig, name: str) -> None:
    (folder / name).unlink()
    assert fault(folder, config).field == name


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_truncated_file_is_named_without_digests(
    folder: Path, config: LLMEngineRunnerConfig, name: str
) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    assert fault(folder, config, digests=False).field == name


def test_a_changed_byte_is_found_by_its_digest_alone(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    path = folder / DATA_FILE
    path.write_bytes(b"x" + path.read_bytes()[1:])
    verify_folder(folder, config, digests=False)
    assert fault(folder, config).field == DATA_FILE


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_file_without_a_record_is_named(
    folder: Path, config: LLMEngineRunnerConfig, name: str
) -> None:
    del config.files[name]
    speculating = msgspec.structs.replace(config, enable_eagle_spec_decode=True)
    for one, file in ((config, "config.json"), (speculating, "base_config.json")):
        error = fault(folder, one)
        assert error.field == name
        assert error.message.startswith(f"{name} is not recorded in {file}: ")


def test_a_record_outside_the_folder_is_refused(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    config.files["../elsewhere"] = FileRecord(1, "0")
    assert fault(folder, config).field == "../elsewhere"


def draft_of(config: LLMEngineRunnerConfig, vocabulary: int) -> LLMEngineRunnerConfig:
    return msgspec.structs.replace(
        config,
        architecture=DRAFT_ARCHITECTURE,
        num_decoder_layers=1,
        base_hidden_dim=48,
        max_draft_tree_size=12,
        output_vocab_size=vocabulary,
    )


def test_a_draft_needs_no_table_and_no_tokenizer(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    for name in (EMBEDDING_FILE, TOKENIZER_FILE):
        (folder / name).unlink()
    draft = draft_of(config, config.vocab_size)
    verify_folder(folder, msgspec.structs.replace(draft, files=record_files(folder)), digests=True)


def test_a_draft_with_its_own_tokens_needs_its_vocabulary(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    assert fault(folder, draft_of(config, 60)).field == VOCABULARY_FILE


def test_the_folder_of_a_draft_is_none_of_the_files(
    folder: Path, config: LLMEngineRunnerConfig
) -> None:
    (folder / DRAFT_FOLDER).mkdir()
    assert record_files(folder) == config.files


def test_a_simulated_engine_needs_no_files(tmp_path: Path) -> None:
    simulated = msgspec.structs.replace(small_config(), backend="simulated", files={})
    verify_folder(tmp_path, simulated, digests=True)


@pytest.mark.parametrize("digests", [True, False])
def test_a_file_that_may_not_be_read_is_named(
    folder: Path, config: LLMEngineRunnerConfig, monkeypatch: pytest.MonkeyPatch, *, digests: bool
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != MODEL_FILE)
    with pytest.raises(
        HearthError, match=r"model.onnx cannot be read \(Permission denied\)"
    ) as told:
        verify_folder(folder, config, digests=digests)
    assert (told.value.code, told.value.field) == ("engine_missing", MODEL_FILE)
