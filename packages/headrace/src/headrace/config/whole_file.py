"""The model of the whole `headrace.yaml`: the core's sections, and those that features add."""

from typing import Any, Final

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
            for key, field in model.model_fields.items():
                core = HeadraceConfig.model_fields.get(key)
                if core and core.annotation is field.annotation:
                    continue
                if key in taken:
                    raise EnvironmentProblem(
                        f"feature {feature.name} adds the section {key}, whose name is taken: uninstall it"
                    )
                taken.add(key)
            checks = model.__pydantic_decorators__
            for name in vars(model).keys() & {*checks.model_validators, *checks.field_validators}:
                if name in taken:
                    raise EnvironmentProblem(f"feature {feature.name} has a check {name}, as another has: uninstall it")
                taken.add(name)
            models.append(model)
    if not models:
        return HeadraceConfig
    about = {"title": HeadraceConfig.__name__}  # of the JSON Schema, whatever is installed
    named: Any = {"__module__": __name__, "__doc__": "The whole file.", "__cls_kwargs__": about}
    return create_model("WholeFile", __base__=tuple(models), **named)


WholeFile: Final = _whole_file()
"""`HeadraceConfig` itself if no feature adds a section."""
