"""Administration: topics, groups, schemas and the cluster; the health of all; the process itself."""
