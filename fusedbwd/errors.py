"""Exceptions: one base class, one subclass per kind of cause. And the one category of warnings."""


class FusedBwdError(Exception):
    """Base of every exception that fusedbwd raises on purpose."""


class SchemaError(FusedBwdError):
    """A schema declaration contradicts itself or the module that it describes."""


class InputError(FusedBwdError, ValueError):
    """A call's tensors do not fit the schema: names the tensor, what was expected, what came."""


class UnsupportedError(FusedBwdError, NotImplementedError):
    """The module, dtype, device or platform is outside what fusedbwd handles."""


class FusionError(FusedBwdError):
    """``strict=True`` and nothing was fused, or a fusion was asked for that cannot be had."""


class VerificationError(FusedBwdError):
    """``verify=True`` and a fused rewrite disagreed with the subgraph that it replaced."""


class FusedBwdWarning(UserWarning):
    """What was asked for runs, and right, but less of it is fused than could be, or untested."""
