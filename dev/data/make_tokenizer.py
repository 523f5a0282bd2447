#!/usr/bin/env python3
"""Writes llm.c's tokenizer file, which turns token ids back into text, from GPT-2's merge list.

  make_tokenizer.py vocab.bpe gpt2_tokenizer.bin

File, little-endian: 256 uint32 header {20240328, version 2, number of tokens, id of <|endoftext|>, 0...}, then for each
token one byte with its length and its bytes. The file appears under its name when it is complete.
"""
import argparse
import os
import struct
import sys

from gpt2_bpe import Gpt2Bpe


def tokenizer_bytes(bpe):
    """Content of the tokenizer file."""
    if max(map(len, bpe.token_bytes)) > 255:
        raise ValueError("a token is longer than 255 bytes, the most that llm.c's tokenizer file can hold")
    header = struct.pack("<256I", 20240328, 2, bpe.vocab_size, bpe.end_of_text, *[0] * 252)
    return header + b"".join(bytes([len(token)]) + token for token in bpe.token_bytes)


def write_tokenizer(path, bpe):
    content = tokenizer_bytes(bpe)
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocab", help="merge list of GPT-2 (vocab.bpe)")
    parser.add_argument("out", help="tokenizer file to write")
    arguments = parser.parse_args()
    try:
        bpe = Gpt2Bpe(arguments.vocab)
        write_tokenizer(arguments.out, bpe)
    except (OSError, ValueError) as error:
        sys.exit("error: %s" % error)
    print("%s: %d tokens of vocabulary" % (arguments.out, bpe.vocab_size))


if __name__ == "__main__":
    main()
