"""The model of the whole `headrace.yaml`: the core's sections, and those that installed features add."""

from typing import Final

from pydantic import create_model

from headrace.config.model import HeadraceConfig
from headrace.errors import EnvironmentProblem
from headrace.feature import features, imported


def _whole_file() -> type[HeadraceConfig]:
    models: list[type[HeadraceConfig]] = []
    taken = {*dir(HeadraceConfig), *HeadraceConfig.model_fields}
    for feature in features():
        if feature.section:
            model = imported(feature.section)
            for key in model.model_fields.keys() - HeadraceConfig.model_fields.keys():
                if key in taken:
                    raise EnvironmentProblem(
                        f"feature {feature.name} adds the section {key}, whose name is taken: uninstall it"
                    )
                taken.add(key)
            models.append(model)
    if not models:
        return HeadraceConfig
    return create_model("WholeFile", __base__=tuple(models), __module__=__name__)


WholeFile: Final = _whole_file()
"""`HeadraceConfig` itself if no feature adds a section."""
