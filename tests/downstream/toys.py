"""The plugin of the configs in this folder: registers the toy data sets of downstream tasks."""

import toy_tasks  # noqa: F401  (this folder is on the path while a plugin is imported)
