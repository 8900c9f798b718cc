"""The test kit, under the name that users import: `from headrace.testing import RecordingBackend`."""

from headrace.extras import require

require("testing", "headrace.testing")

from headrace_devkit.testing import *  # noqa: E402, F403
