from runtime.executor.engine import EngineOptions
from runtime.executor.engine_executor import EngineExecutor
from runtime.executor.snapshot import BindingSnapshot

__all__ = ["BindingSnapshot", "EngineExecutor", "EngineOptions"]
