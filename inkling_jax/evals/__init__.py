"""Tasks that measure a model: what it is asked, what counts as right, and how two runs are compared."""
