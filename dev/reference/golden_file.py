"""The two file formats that the reference scripts write.

Golden file (read by test/golden_file.h), little-endian, no padding:
    8 bytes  magic "LLMCGOLD"        uint32 version 1        uint32 number of entries
    per entry: uint32 length of the name, the name, uint32 type (0 float32, 1 int32, 2 float64),
               uint32 number of dimensions, int64 per dimension, then the values in row-major order
Model file of llm.c: 256 int32 header, then 16 arrays, each with all layers back to back; version 3 float32, 5 bf16.
"""
import struct

import numpy as np

MAGIC = b"LLMCGOLD"
TYPES = [np.dtype("<f4"), np.dtype("<i4"), np.dtype("<f8")]

LAYER_TENSORS = ["ln_1.weight", "ln_1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias",
                 "ln_2.weight", "ln_2.bias", "mlp.fc.weight", "mlp.fc.bias", "mlp.proj.weight", "mlp.proj.bias"]


def golden_bytes(entries):
    """The content of a golden file. `entries`: name -> array of float32, int32 or float64, in the order given."""
    parts = [MAGIC, struct.pack("<II", 1, len(entries))]
    for name, values in entries.items():
        values = np.ascontiguousarray(values)
        encoded = name.encode("ascii")
        parts.append(struct.pack("<I", len(encoded)) + encoded)
        parts.append(struct.pack("<II", TYPES.index(values.dtype), values.ndim))
        parts.append(struct.pack("<%dq" % values.ndim, *values.shape))
        parts.append(values.tobytes())
    return b"".join(parts)


def read_golden(content):
    """Inverse of golden_bytes."""
    assert content[:8] == MAGIC, "not a golden file"
    version, count = struct.unpack_from("<II", content, 8)
    assert version == 1
    at, entries = 16, {}
    for _ in range(count):
        length, = struct.unpack_from("<I", content, at)
        name = content[at + 4:at + 4 + length].decode("ascii")
        at += 4 + length
        kind, rank = struct.unpack_from("<II", content, at)
        shape = struct.unpack_from("<%dq" % rank, content, at + 8)
        at += 8 + 8 * rank
        size = int(np.prod(shape, dtype=np.int64))
        entries[name] = np.frombuffer(content, TYPES[kind], size, at).reshape(shape)
        at += size * TYPES[kind].itemsize
    assert at == len(content), "bytes left over"
    return entries


def bf16_bits(values):
    """Nearest bf16 of float32 values (ties to even), as uint16. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_round(values):
    """Nearest bf16, as float32."""
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)


def llmc_model_bytes(config, weights, version):
    """A model file of llm.c. `config`: as in gpt2_golden.py; `weights`: name -> float32 array."""
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, version, config["max_seq_len"], config["vocab"], config["layers"], config["heads"],
                  config["channels"], config["padded_vocab"]]
    names = ["wte.weight", "wpe.weight"]
    for tensor in LAYER_TENSORS:
        names += ["h.%d.%s" % (layer, tensor) for layer in range(config["layers"])]
    names += ["ln_f.weight", "ln_f.bias"]
    encode = {3: lambda x: x.astype("<f4"), 5: lambda x: bf16_bits(x).astype("<u2")}[version]
    return header.tobytes() + b"".join(encode(weights[name]).tobytes() for name in names)
