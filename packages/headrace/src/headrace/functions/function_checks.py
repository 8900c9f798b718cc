"""What commands check of functions without a process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import FeatureChecks


def _schema() -> dict[str, Any]:
    from headrace.functions.file_schema import function_schema

    return function_schema()


class FunctionChecks(FeatureChecks):
    """Function files."""

    schemas: Mapping[str, Callable[[], dict[str, Any]]] = {"function": _schema}

    def loaders(self, config: HeadraceConfig | None) -> Mapping[str, Callable[[Path], object]]:
        def load(path: Path) -> object:
            from headrace.functions.load import load_function

            return load_function(path, config=config, check_handler=True)

        return {"functions": load}
