"""Finds what a pipeline file names by `module:name`: in a file of the pipeline's folder, or installed."""

import importlib
import sys
from typing import Any

from headrace.errors import PipelineInvalid


def imported(folder: str, reference: str, setting: str) -> Any:
    """Return what a reference names.

    Raises:
        PipelineInvalid: It cannot be imported, or is not there; the text begins with the name of the setting.
    """
    module_name, name = reference.split(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise PipelineInvalid(f"{setting}: module {module_name} does not define {name}") from None
    except ModuleNotFoundError as cause:
        where = f"module {cause.name} is neither in {folder} nor installed"
        raise PipelineInvalid(f"{setting}: {reference} cannot be imported: {where}") from None
    except Exception as cause:  # boundary to user code: the status shows the reason
        raise PipelineInvalid(f"{setting}: importing {module_name} failed: {type(cause).__name__}: {cause}") from cause
