"""Writes a quantized GGUF file anew with its weights as floats, so that llama.cpp computes as we do."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

TYPES = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}


def write_floats(source: Path, target: Path, dtype: str) -> None:
    """Copies metadata as it is and matrices as `dtype`; vectors stay float32, as llama.cpp wants them."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")  # the architecture's key is written by this
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        kind, inner = field.types[0], field.types[-1]
        array = kind == GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner if array else None)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = TYPES[dtype] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
