"""What a runtime does with adapters, of which all rows that run together share one."""

from pathlib import Path

from runtime.adapters.adapter import Adapter
from runtime.adapters.stored import adapter_folders
from runtime.errors import HearthError
from runtime.rows import DecodingInferenceContext
from runtime.steps.engine_runner import LLMEngineRunner


class AdapterRows:
    """The adapters of a runtime; a switch needs that no row of it is active."""

    _runner: LLMEngineRunner
    _context: DecodingInferenceContext

    @property
    def adapter(self) -> str:
        """The adapter that all rows share; "" for none."""
        return self._runner.get_active_lora_weights_name()

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that rows may ask for."""
        return self._runner.get_available_lora_weights()

    def switch_adapter(self, name: str) -> None:
        """Let the next rows run with an adapter, or "" none, while no row is active.

        Raises `adapter_unknown`, and `internal` where a row is active. `admit` does it by itself.
        """
        if self._context.any_live:
            raise HearthError("internal", "switch the adapter while no row is active", "adapter")
        self._runner.switch_lora_weights(name)

    def load_adapter(self, name: str, source: Path | Adapter) -> None:
        """Load an adapter from a folder, PEFT's or a stored one, or one that was read elsewhere.

        Rows go on. Raises `adapter_invalid`, `unsupported_option` where the engine takes none,
        `out_of_memory`, and `invalid_value` for a name that is taken.
        """
        self._runner.load_lora_weights(name, source)

    def load_adapters(self, folder: Path) -> dict[str, HearthError]:
        """Load all adapters of a folder by their names; those that cannot be served, and why.

        Raises `invalid_value` where the folder cannot be read.
        """
        tried = {name: self._try(name, path) for name, path in adapter_folders(folder).items()}
        return {name: error for name, error in tried.items() if error is not None}

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; raises `adapter_unknown`, and `internal` where rows run with it."""
        if name and name == self.adapter:
            self.switch_adapter("")
        self._runner.unload_lora_weights(name)

    def _try(self, name: str, folder: Path) -> HearthError | None:
        try:
            self.load_adapter(name, folder)
        except HearthError as error:
            if error.code == "device_lost":
                raise
            return error
        return None

    def _check_adapter(self, name: str) -> None:
        """Raise `adapter_unknown`, or `unsupported_option` where the engine takes none."""
        self._runner.get_lora_weights_digest(name)

    def _take_adapter(self, names: set[str]) -> None:
        """Switch where no row is active; raises `invalid_value` unless rows share an adapter."""
        if self._context.any_live:
            names = names | {self.adapter}
        if len(names) > 1:
            what = "rows that run together share an adapter, or have none"
            raise HearthError("invalid_value", what, "adapter")
        self._runner.switch_lora_weights(*names)
