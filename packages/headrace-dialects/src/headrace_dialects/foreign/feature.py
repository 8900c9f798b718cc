"""Dead letters of other products: their readers, and the setting that proves their origin."""

from headrace.feature import Feature

FEATURE = Feature(
    name="foreign",
    section="headrace_dialects.foreign.foreign_sections:ForeignSections",
    dead_letters="headrace_dialects.foreign.foreign_readers:READERS",
)
