"""Compiler-driven fusion of training backward passes, built on torch.compile.

``compile`` fuses a module's backward in place; ``export_backward`` gives it as a callable over
documented saved tensors; ``report`` says what was fused and why the rest was not.
"""

from fusedbwd.config import Config
from fusedbwd.errors import (
    FusedBwdError,
    FusedBwdWarning,
    FusionError,
    InputError,
    SchemaError,
    UnsupportedError,
    VerificationError,
)
from fusedbwd.export import ExportedBackward, export_backward
from fusedbwd.infer import infer_schema
from fusedbwd.report import Report
from fusedbwd.schema import Gradient, Input, Schema
from fusedbwd.tagging import tag
from fusedbwd.training import compile, report

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ExportedBackward",
    "FusedBwdError",
    "FusedBwdWarning",
    "FusionError",
    "Gradient",
    "Input",
    "InputError",
    "Report",
    "Schema",
    "SchemaError",
    "UnsupportedError",
    "VerificationError",
    "compile",
    "export_backward",
    "infer_schema",
    "report",
    "tag",
]
