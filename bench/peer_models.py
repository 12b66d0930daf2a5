"""The model as each peer reads it: a bfloat16 folder of Hugging Face's form, and GGUF files in 16 bits.

All hold the same numbers, those that our own executor computes with: what the model's file says, dequantised
and rounded to bfloat16.
"""

import json
from pathlib import Path

import gguf
import numpy as np


def gguf_of(model: Path) -> Path:
    """The GGUF file in the folder `model`. Raises SystemExit when there is none."""
    found = sorted(model.glob("*.gguf")) if model.is_dir() else [model]
    if len(found) != 1 or not found[0].exists():
        raise SystemExit(f"{model}: peers are given what one GGUF file holds; {len(found)} were found")
    return found[0]


def folder_in_bfloat16(model: Path, folder: Path) -> Path:
    """Config, tokenizer and bfloat16 safetensors, for vLLM."""
    if (folder / "config.json").exists():
        return folder
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    from executor.model.opening import open_checkpoint

    file = gguf_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = open_checkpoint(file).tensors
    in_bfloat16 = {name: stored.read().bfloat16().contiguous() for name, stored in tensors.items()}
    save_file(in_bfloat16, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    config |= {"architectures": [f"{config['model_type'].capitalize()}ForCausalLM"], "dtype": "bfloat16"}
    config.pop("quantization_config", None)
    # Last: a folder with a config is complete.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def gguf_in(kind: gguf.GGMLQuantizationType, model: Path, path: Path) -> Path:
    """The same GGUF file with its matrices, rounded to bfloat16 before, as `kind`."""
    if path.exists():
        return path
    reader = gguf.GGUFReader(gguf_of(model))
    architecture = reader.fields["general.architecture"].contents()
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == "general.file_type":
            value = gguf.LlamaFileType[f"MOSTLY_{kind.name}"]
        writer.add_key_value(
            name, value, field.types[0], sub_type=field.types[1] if field.types[1:] else None
        )
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:  # norms
            writer.add_tensor(tensor.name, values)
            continue
        rounded = gguf.quants.dequantize(
            gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16), gguf.GGMLQuantizationType.BF16
        )
        writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)
    return path
