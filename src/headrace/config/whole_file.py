"""The model of the whole `headrace.yaml`: the core's sections, and those that installed features add."""

from typing import Any, Final

from pydantic import Field, create_model

from headrace.config.model import HeadraceConfig
from headrace.errors import EnvironmentProblem
from headrace.feature import features, imported


def _whole_file() -> type[HeadraceConfig]:
    added: dict[str, Any] = {}
    for feature in features():
        if feature.section:
            key, where = feature.section
            if hasattr(HeadraceConfig, key) or key in HeadraceConfig.model_fields or key in added:
                raise EnvironmentProblem(
                    f"feature {feature.name} adds the section {key}, whose name is taken: uninstall it"
                )
            model = imported(where)
            added[key] = (model, Field(default_factory=model))
    if not added:
        return HeadraceConfig
    return create_model("WholeFile", __base__=HeadraceConfig, __module__=__name__, **added)


WholeFile: Final = _whole_file()
"""`HeadraceConfig` itself if no feature adds a section."""
