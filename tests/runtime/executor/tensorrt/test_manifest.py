import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.executor.tensorrt.manifest import check_plan
from tests.runtime.engine_configs import PLAN, small_config

CONFIG = structs.replace(small_config(), backend="tensorrt", plan=PLAN)


def check(version: str, *, built_by: str, compatible: bool) -> None:
    plan = structs.replace(PLAN, tensorrt_version=built_by, version_compatible=compatible)
    check_plan(structs.replace(CONFIG, plan=plan), version, "A", (9, 0))


@pytest.mark.parametrize(
    ("built_by", "version", "compatible"),
    [
        ("8.6.1", "8.6.1", False),
        ("10.16.1", "10.16.1.11", False),
        ("8.6.1", "10.16.1.11", True),
        ("10.3.0", "11.4.0", True),
        ("10.0.0b6", "10.0.0b6", False),
    ],
)
def test_a_plan_runs_on(built_by: str, version: str, *, compatible: bool) -> None:
    check(version, built_by=built_by, compatible=compatible)


@pytest.mark.parametrize(
    ("built_by", "version", "compatible"),
    [
        ("8.6.1", "10.16.1", False),
        ("10.16.1", "10.15.0", True),
        ("8.6.1", "11.4.0", True),
        ("10.16.1", "10.16.2", False),
    ],
)
def test_a_plan_does_not_run_on(built_by: str, version: str, *, compatible: bool) -> None:
    with pytest.raises(HearthError) as error:
        check(version, built_by=built_by, compatible=compatible)
    assert (error.value.code, error.value.field) == ("engine_incompatible", "tensorrt_version")
    assert built_by in error.value.message
    assert version in error.value.message
    assert "export the model again" in error.value.message


@pytest.mark.parametrize("field", ["gpu_name", "compute_capability"])
def test_a_plan_of_another_gpu_is_refused(field: str) -> None:
    plan = structs.replace(PLAN, **{field: "8.7"})
    with pytest.raises(HearthError) as error:
        check_plan(structs.replace(CONFIG, plan=plan), "8.6.1", "A", (9, 0))
    assert (error.value.code, error.value.field) == ("engine_incompatible", field)


def test_a_plan_of_rtx_runs_on_another_gpu_of_its_version() -> None:
    plan = structs.replace(
        PLAN,
        builder="tensorrt_rtx",
        tensorrt_version="1.7.1.116",
        version_compatible=False,
        gpu_name="B",
        compute_capability="8.6",
    )
    config = structs.replace(CONFIG, plan=plan)
    assert check_plan(config, "1.7.1.116", "A", (12, 0)) is plan
    with pytest.raises(HearthError, match=r"built by TensorRT-RTX 1\.7\.1"):
        check_plan(config, "1.8.0.1", "A", (12, 0))
    for board in ((8, 7), (9, 0), (11, 0)):
        with pytest.raises(HearthError, match=r"8\.9, or 12\.0 and newer; A has .*--device cuda"):
            check_plan(config, "1.7.1.116", "A", board)


def test_a_plan_of_this_gpu_is_taken() -> None:
    plan = structs.replace(PLAN, gpu_name="A", compute_capability="9.0")
    assert check_plan(structs.replace(CONFIG, plan=plan), "8.6.1", "A", (9, 0)) is plan


def test_a_folder_without_a_record_is_corrupt() -> None:
    with pytest.raises(HearthError) as error:
        check_plan(structs.replace(CONFIG, plan=None), "8.6.1", "A", (9, 0))
    assert error.value.code == "engine_corrupt"
