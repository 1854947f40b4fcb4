"""A finished run, for others: its models as safetensors and ONNX, and a model card."""

from fairveil.export.models import load_model as load_model
from fairveil.export.writing import Exported as Exported
from fairveil.export.writing import export_run as export_run
