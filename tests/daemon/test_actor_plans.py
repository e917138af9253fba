from pathlib import Path

from hearth.actors.addresses import SocketFolder
from hearth.actors.messages import ExecutorLimits, ExecutorReady
from hearth.actors.roles import ExecutorSettings
from hearth.actors.supervisor_messages import ActorReady
from hearth.daemon.actor_plans import executor_plan, executor_ready
from hearth.daemon.configuration.settings import settings_of


def test_the_executor_s_paths_do_not_depend_on_the_working_folder() -> None:
    settings = settings_of(restart_limit=7, log_format="json", threads=3, weights="w")
    plan = executor_plan(settings, Path("engines/x"), "b09")
    assert isinstance(plan.settings, ExecutorSettings)
    assert plan.settings.engine == str(Path.cwd() / "engines/x")
    assert plan.settings.options.weights == str(Path.cwd() / "w")
    assert (plan.role, plan.epoch) == ("executor", "b09")


def test_a_plan_has_the_sections_themselves() -> None:
    settings = settings_of(restart_limit=7, log_format="json", threads=3)
    plan = executor_plan(settings, Path("x"))
    assert plan.supervision is settings.supervision
    assert plan.logs is settings.logs


def test_the_scheduler_is_told_where_an_executor_listens_and_what_it_takes() -> None:
    addresses = SocketFolder(Path("/run/h")).addresses("executor", 2)
    ready = ActorReady("executor-2", 1, {}, ExecutorLimits(3, 4, 5))
    assert executor_ready(ready, addresses) == ExecutorReady(
        2, "ipc:///run/h/executor-2", ExecutorLimits(3, 4, 5)
    )
