#!/usr/bin/env python3
"""Turns text files into token shards for training and validation (llm.c's format, see llmc/token_shards.h).

  prepare_text.py moby_dick.txt sherlock_holmes.txt --out data/novels
      one token per byte (vocabulary 256): data/novels_train.bin, data/novels_val.bin
  prepare_text.py book.txt --bpe vocab.bpe --out data/book
      GPT-2 tokens (vocabulary 50257), and data/book_tokenizer.bin to turn them back into text
  prepare_text.py tinyshakespeare.txt --bpe vocab.bpe --documents sections --val-first 32768 --out data/tiny_shakespeare
      the same files, byte for byte, as llm.c's tinyshakespeare.py

Validation gets the last part of every file (--val-fraction), cut at a line, or the first tokens of all (--val-first).
Training data longer than --shard-tokens goes into several files, OUT_train_000000.bin and so on.
Standard library only. Files appear under their names when they are complete.
"""
import argparse
import array
import glob
import os
import re
import struct
import sys

TOKEN_FILE_MAGIC = 20240520
CHUNK = 1 << 24  # bytes of text in memory at a time, byte level


def fail(message):
    sys.exit("error: " + message)  # exit code 1; argparse uses 2 for wrong options


def little_endian(tokens):
    """uint16 tokens as bytes."""
    packed = array.array("H", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def bytes_as_tokens(text):
    """Each byte as a little-endian uint16."""
    packed = bytearray(2 * len(text))
    packed[0::2] = text
    return bytes(packed)


class ShardWriter:
    """Appends tokens (packed uint16) to files of at most `shard_tokens` tokens each."""

    def __init__(self, prefix, shard_tokens):
        self.prefix = prefix
        self.shard_tokens = shard_tokens
        self.parts = []  # (temporary name, tokens)
        self.file = None
        self.total = 0

    def write(self, packed):
        while packed:
            if self.file is None:
                name = "%s_%06d.bin.tmp" % (self.prefix, len(self.parts))
                self.parts.append([name, 0])
                self.file = open(name, "wb")
                self.file.write(bytes(1024))
            room = 2 * (self.shard_tokens - self.parts[-1][1])
            part, packed = packed[:room], packed[room:]
            self.file.write(part)
            self.parts[-1][1] += len(part) // 2
            self.total += len(part) // 2
            if self.parts[-1][1] == self.shard_tokens:
                self._finish()

    def _finish(self):
        header = struct.pack("<256i", TOKEN_FILE_MAGIC, 1, self.parts[-1][1], *[0] * 253)
        self.file.seek(0)
        self.file.write(header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None

    def publish(self):
        """Gives the files their names, PREFIX.bin for one, PREFIX_NNNNNN.bin for several; removes a former run's."""
        if self.file is not None:
            self._finish()
        names = []
        for temporary, _ in self.parts:
            name = self.prefix + ".bin" if len(self.parts) == 1 else temporary[: -len(".tmp")]
            os.replace(temporary, name)
            names.append(name)
        for old in glob.glob(glob.escape(self.prefix) + "*.bin"):
            if re.fullmatch(r"(_\d{6})?\.bin", old[len(self.prefix) :]) and old not in names:
                os.remove(old)
                print("%s: removed, it was made before with another --shard-tokens" % old)
        for (_, tokens), name in zip(self.parts, names):
            print("%s: %d tokens" % (name, tokens))

    def discard(self):
        if self.file is not None:
            self.file.close()
        for temporary, _ in self.parts:
            if os.path.exists(temporary):
                os.remove(temporary)


def cut_position(read_at, size, fraction):
    """Where validation starts: after the last line end before (1 - fraction) * size, else there."""
    wanted = int(size * (1.0 - fraction))
    first = max(0, wanted - 4096)
    line_end = read_at(first, wanted - first).rfind(b"\n")
    return wanted if line_end < 0 else first + line_end + 1


def byte_pieces(path, fraction):
    """Yields (is_validation, packed tokens) of a file, one token per byte."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size

        def read_at(position, count):
            file.seek(position)
            return file.read(count)

        cut = cut_position(read_at, size, fraction) if fraction > 0 else size
        for position, end in ((0, cut), (cut, size)):
            while position < end:
                chunk = read_at(position, min(CHUNK, end - position))
                yield position >= cut, bytes_as_tokens(chunk)
                position += len(chunk)


def bpe_pieces(path, fraction, bpe, documents):
    """Yields (is_validation, packed tokens) of a file in GPT-2 tokens, with end-of-text before each document."""
    with open(path, "rb") as file:
        content = file.read()
    cut = len(content)
    if fraction > 0:
        cut = cut_position(lambda position, count: content[position : position + count], len(content), fraction)
        while cut < len(content) and content[cut] & 0xC0 == 0x80:  # not inside a character
            cut += 1
    for is_validation, part in ((False, content[:cut]), (True, content[cut:])):
        if not part:
            continue
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError as error:
            fail("%s is not UTF-8 text at byte %d; convert it, or leave out --bpe" % (path, error.start))
        sections = [text]
        if documents == "sections":
            sections = text.split("\n\n")
            sections = [section + "\n\n" for section in sections[:-1]] + sections[-1:]
        for section in sections:
            start = [] if documents == "none" else [bpe.end_of_text]
            yield is_validation, little_endian(start + bpe.encode(section))


def load_bpe(vocabulary):
    if not os.path.isfile(vocabulary):
        fail("no file %s; --bpe needs GPT-2's merge list vocab.bpe, without --bpe a token is a byte" % vocabulary)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from gpt2_bpe import Gpt2Bpe

    try:
        return Gpt2Bpe(vocabulary)
    except ValueError as error:
        fail(str(error))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="text files")
    parser.add_argument("--out", metavar="PREFIX", help="files start with it (default: data/NAME of the first text)")
    parser.add_argument("--bpe", metavar="VOCAB.BPE", help="GPT-2 tokens by this merge list instead of bytes")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="part of each text for validation (0.1)")
    parser.add_argument("--val-first", type=int, metavar="N", help="instead: the first N tokens of all files")
    parser.add_argument("--documents", choices=("none", "files", "sections"),
                        help="--bpe: end-of-text before each file (default) or each section after a blank line")
    parser.add_argument("--shard-tokens", type=int, default=100000000, help="longest file (default 100000000)")
    arguments = parser.parse_args()
    if not 0.0 < arguments.val_fraction < 1.0:
        parser.error("--val-fraction must be between 0 and 1")
    if arguments.val_first is not None and arguments.val_first < 2:
        parser.error("--val-first must be at least 2")
    if arguments.shard_tokens < 2:
        parser.error("--shard-tokens must be at least 2")
    if arguments.documents and not arguments.bpe:
        parser.error("--documents needs --bpe: bytes have no end-of-text token")
    if not arguments.out:
        arguments.out = os.path.join("data", os.path.splitext(os.path.basename(arguments.text[0]))[0])
    return arguments


def main():
    arguments = parse_arguments()
    for path in arguments.text:
        if not os.path.isfile(path):
            fail("no file %s" % path)
        if os.path.getsize(path) == 0:
            fail("%s is empty" % path)
    bpe = load_bpe(arguments.bpe) if arguments.bpe else None
    os.makedirs(os.path.dirname(arguments.out) or ".", exist_ok=True)
    train = ShardWriter(arguments.out + "_train", arguments.shard_tokens)
    val = ShardWriter(arguments.out + "_val", arguments.shard_tokens)
    fraction = 0.0 if arguments.val_first else arguments.val_fraction
    first_left = arguments.val_first or 0
    try:
        for path in arguments.text:
            documents = arguments.documents or "files"
            pieces = bpe_pieces(path, fraction, bpe, documents) if bpe else byte_pieces(path, fraction)
            for is_validation, packed in pieces:
                first, packed = packed[: 2 * first_left], packed[2 * first_left :]
                first_left -= len(first) // 2
                val.write(first)
                (val if is_validation else train).write(packed)
        for writer, what in ((train, "training"), (val, "validation")):
            if writer.total < 2:
                fail("the text leaves %d tokens for %s; use more text or another split" % (writer.total, what))
        train.publish()
        val.publish()
        if bpe:
            from make_tokenizer import write_tokenizer

            write_tokenizer(arguments.out + "_tokenizer.bin", bpe)
            print("%s_tokenizer.bin: for --tokenizer" % arguments.out)
    except OSError as error:
        fail("%s: %s" % (error.filename or arguments.out, error.strerror))
    finally:
        train.discard()
        val.discard()


if __name__ == "__main__":
    main()
