"""Export: a Hugging Face folder in, an engine folder out; no PyTorch needed."""

from runtime.export.draft_config import DraftOptions
from runtime.export.export import export_model
from runtime.export.options import ExportOptions
from runtime.export.progress import Progress

__all__ = ["DraftOptions", "ExportOptions", "Progress", "export_model"]
