"""Errors that inkling_jax raises on purpose. Each message names the thing at fault and what would be right."""


class InklingError(Exception):
    """Base of every error raised on purpose; a CLI prints its message on one line and exits with code 2."""


class ConfigError(InklingError):
    """A configuration is inconsistent, unknown or hostile; the message names the field."""


class CheckpointError(InklingError):
    """A checkpoint file or tensor is missing, truncated, foreign or contradicts the configuration."""


class InputError(InklingError):
    """A prompt, sampling field or command-line value is not usable."""


class CapacityError(InklingError):
    """Memory, pages or context do not suffice; the message gives both numbers."""
