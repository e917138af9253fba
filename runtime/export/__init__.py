"""Export: a Hugging Face folder in, an engine folder out; no PyTorch needed."""

from hearth.runtime.export.draft_config import DraftOptions
from hearth.runtime.export.export import export_model
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.writer import Progress

__all__ = ["DraftOptions", "ExportOptions", "Progress", "export_model"]
