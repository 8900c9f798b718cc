"""Administration of one process: what it is, its log, what it reloads, and its end."""

from headrace.feature import Feature

FEATURE = Feature(
    name="process",
    parts="headrace.admin.process.administration_parts:AdministrationParts",
    endpoints=["headrace.admin.process.routes:AdministrationEndpoints"],
    tags={"Administration": ["/adm/server", "/adm/logger", "/adm/modules", "/adm/shutdown"]},
    needs=["active"],
)
