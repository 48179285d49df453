"""What `python -m inkling_jax.bench` measures: one module a subcommand, and what they share."""
