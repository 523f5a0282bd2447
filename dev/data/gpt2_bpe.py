#!/usr/bin/env python3
"""GPT-2's byte-pair encoding in plain Python, from the merge list alone (vocab.bpe; encoder.json is not needed).

  gpt2_bpe.py vocab.bpe encode book.txt        token ids on one line (stdin without a file)
  gpt2_bpe.py vocab.bpe encode --count book.txt
  gpt2_bpe.py vocab.bpe decode ids.txt         the text of ids separated by white space

Ids: 0..255 single bytes in GPT-2's order (the 188 bytes that print in Latin-1, then the other 68), 256 + i the result
of merge i, then one more for <|endoftext|> (50256 in GPT-2). Text is first split into pieces
    's 't 're 've 'm 'll 'd |  ?letters |  ?numbers |  ?others | white space
and within a piece the pair of neighbours that comes first in the merge list is merged until none is left.
Letters and numbers are Unicode's (categories L* and N*) as this Python knows them. Standard library only.
Source: Radford et al. 2019, section 2.2; Sennrich et al. 2016.
"""
import argparse
import functools
import re
import sys
import unicodedata

PRINTABLE = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
BYTE_ORDER = PRINTABLE + [b for b in range(256) if b not in set(PRINTABLE)]
# in the merge list a byte that does not print stands as the character 256, 257, ...
BYTE_OF_CHARACTER = {chr(b if i < len(PRINTABLE) else 256 + i - len(PRINTABLE)): b for i, b in enumerate(BYTE_ORDER)}
# Unicode's White_Space; str.isspace() would add the separators 1c to 1f, which GPT-2 counts as others
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def character_ranges(category, last):
    """Inside of a regular expression's [...] for the characters up to `last` whose category starts with `category`."""
    ranges, first = [], None
    for code in range(last + 2):
        inside = code <= last and unicodedata.category(chr(code))[0] == category
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            ranges.append("\\U%08x-\\U%08x" % (first, code - 1))
            first = None
    return "".join(ranges)


@functools.lru_cache(maxsize=None)
def split_pattern(last):
    """GPT-2's pattern for texts whose characters are at most `last`. For all of Unicode it takes 0.5 s, once."""
    parts = {"L": character_ranges("L", last), "N": character_ranges("N", last), "S": SPACES}
    return re.compile("'(?:[stmd]|re|ve|ll)| ?[%(L)s]+| ?[%(N)s]+| ?[^%(S)s%(L)s%(N)s]+"
                      "|[%(S)s]+(?![^%(S)s])|[%(S)s]+" % parts)


class Gpt2Bpe:
    """Encoder and decoder for one merge list.

    vocab_size       number of tokens, with <|endoftext|>
    end_of_text      its id, the last one; encode() never makes it
    token_bytes[id]  the bytes of a token
    """

    CACHE_PIECES = 1 << 20  # bounds the memory on texts without end: about 200 MB

    def __init__(self, path):
        """Reads vocab.bpe. ValueError, in words, if it is no merge list; OSError if it cannot be read."""
        self.id_of_byte = [0] * 256
        for token, byte in enumerate(BYTE_ORDER):
            self.id_of_byte[byte] = token
        self.token_bytes = [bytes([byte]) for byte in BYTE_ORDER]
        self.merges = {}  # pair of ids -> id; a smaller id is an earlier merge
        self._cache = {}
        self._read_merges(path)
        self.end_of_text = len(self.token_bytes)
        self.token_bytes.append(b"<|endoftext|>")
        self.vocab_size = len(self.token_bytes)

    def _read_merges(self, path):
        ids = {token: number for number, token in enumerate(self.token_bytes)}
        try:
            with open(path, encoding="utf-8", newline="\n") as file:
                lines = file.read().split("\n")
        except UnicodeDecodeError:
            raise ValueError("%s is not a merge list of GPT-2 (vocab.bpe): not UTF-8 text" % path) from None
        if lines and lines[0].startswith("#version"):
            lines[0] = ""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            pair = line.rstrip("\r").split(" ")
            try:
                left, right = (ids[bytes(BYTE_OF_CHARACTER[character] for character in part)] for part in pair)
            except (KeyError, ValueError):
                raise ValueError("%s is not a merge list of GPT-2 (vocab.bpe): line %d merges no two earlier tokens:"
                                 " %s" % (path, number, ascii(line[:60]))) from None
            merged = self.token_bytes[left] + self.token_bytes[right]
            if merged in ids:
                raise ValueError("%s: line %d makes a token that exists already" % (path, number))
            ids[merged] = self.merges[left, right] = len(self.token_bytes)
            self.token_bytes.append(merged)
        if not self.merges:
            raise ValueError("%s is not a merge list of GPT-2 (vocab.bpe): it has no merges" % path)

    def encode(self, text):
        """Token ids of a str. <|endoftext|> in it is text like any other. Surrogate escapes become their bytes."""
        pattern = split_pattern(127 if text.isascii() else sys.maxunicode)
        cache, tokens = self._cache, []
        for piece in pattern.findall(text):
            known = cache.get(piece)
            if known is None:
                if len(cache) >= self.CACHE_PIECES:
                    cache.clear()
                known = cache[piece] = self._encode_piece(piece)
            tokens.extend(known)
        return tokens

    def _encode_piece(self, piece):
        tokens = [self.id_of_byte[byte] for byte in piece.encode("utf-8", "surrogateescape")]
        while len(tokens) > 1:
            known = [self.merges[pair] for pair in zip(tokens, tokens[1:]) if pair in self.merges]
            if not known:
                break
            tokens = self._merge(tokens, min(known))
        return tokens

    def _merge(self, tokens, best):
        """Every pair that makes `best`, from the left."""
        result, at = [], 0
        while at < len(tokens):
            if at + 1 < len(tokens) and self.merges.get((tokens[at], tokens[at + 1])) == best:
                result.append(best)
                at += 2
            else:
                result.append(tokens[at])
                at += 1
        return result

    def decode(self, tokens):
        """The bytes of these tokens (a token may end inside a character, so this is not always UTF-8)."""
        return b"".join(self.token_bytes[token] for token in tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocab", help="merge list of GPT-2 (vocab.bpe)")
    parser.add_argument("action", choices=("encode", "decode"))
    parser.add_argument("file", nargs="?", default="-", help="input (default: standard input)")
    parser.add_argument("--count", action="store_true", help="encode: only the number of tokens")
    arguments = parser.parse_intermixed_args()
    try:
        bpe = Gpt2Bpe(arguments.vocab)
        if arguments.file == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(arguments.file, "rb") as file:
                content = file.read()
        if arguments.action == "encode":
            tokens = bpe.encode(content.decode("utf-8", "surrogateescape"))
            print(len(tokens) if arguments.count else " ".join(map(str, tokens)))
        else:
            tokens = [int(word) for word in content.split()]
            if any(not 0 <= token < bpe.vocab_size for token in tokens):
                raise ValueError("ids must be in 0..%d" % (bpe.vocab_size - 1))
            sys.stdout.buffer.write(bpe.decode(tokens))
    except (OSError, ValueError) as error:
        sys.exit("error: %s" % error)


if __name__ == "__main__":
    main()
