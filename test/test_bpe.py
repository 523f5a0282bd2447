"""test_bpe.py -- GPT-2's byte-pair encoding and the tokenizer file.

    python3 test/test_bpe.py

Most tests use a small merge list of their own. With LLMC_TEST_DATA=FOLDER, the folder of gpt2_vocab.bpe and
tinyshakespeare.txt, also GPT-2's own ids and the token files of llm.c.
"""
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
DATA_SCRIPTS = os.path.join(ROOT, "dev", "data")
sys.path.insert(0, DATA_SCRIPTS)

from gpt2_bpe import Gpt2Bpe, split_pattern  # noqa: E402
from make_tokenizer import tokenizer_bytes  # noqa: E402

TEST_DATA = os.environ.get("LLMC_TEST_DATA", "")
# "Ġ" is how a merge list writes a space; "Ã ©" makes é of its two bytes
MERGES = "#version: 0.2\nl o\nlo w\n\u0120 low\ne r\nlow er\n\u00c3 \u00a9\na a\naa aa\n"


def run(*arguments, stdin=b""):
    """Runs a script of dev/data; returns exit code, stdout, stderr."""
    command = [sys.executable, os.path.join(DATA_SCRIPTS, arguments[0])] + list(arguments[1:])
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=300)
    return result.returncode, result.stdout, result.stderr.decode()


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def file(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        return self.path(name)

    def bpe(self, merges=MERGES):
        return Gpt2Bpe(self.file("vocab.bpe", merges))


class Splitting(unittest.TestCase):
    def pieces(self, text):
        both = split_pattern(sys.maxunicode).findall(text)
        if text.isascii():
            self.assertEqual(split_pattern(127).findall(text), both)
        self.assertEqual("".join(both), text)
        return both

    def test_words_contractions_numbers_and_signs(self):
        """Each alternative of the pattern, in its order; a contraction only in lower case."""
        self.assertEqual(self.pieces("I've  2 apples!? they'LL"),
                         ["I", "'ve", " ", " 2", " apples", "!?", " they", "'", "LL"])
        self.assertEqual(self.pieces("x=42;'s't're'm'll'd"), ["x", "=", "42", ";'", "s", "'t", "'re", "'m", "'ll", "'d"])

    def test_white_space_leaves_one_blank_for_the_next_word(self):
        """A run of white space leaves its last character to what follows; at the end of the text it takes all."""
        self.assertEqual(self.pieces("a   b"), ["a", "  ", " b"])
        self.assertEqual(self.pieces("a\n\n b \t\n"), ["a", "\n\n", " b", " \t\n"])
        self.assertEqual(self.pieces("\n\nA"), ["\n", "\n", "A"])

    def test_unicode_categories(self):
        """Letters and numbers of all scripts; NBSP, ideographic space are white space; marks, emoji are others."""
        self.assertEqual(self.pieces("na\u00efve \u0444\u0443 \u4e2d\u6587\u00bd\u0663"),
                         ["na\u00efve", " \u0444\u0443", " \u4e2d\u6587", "\u00bd\u0663"])
        self.assertEqual(self.pieces("e\u0301!\u00a0\u00a0x\u3000\u3000y"),
                         ["e", "\u0301!", "\u00a0", "\u00a0", "x", "\u3000", "\u3000", "y"])
        self.assertEqual(self.pieces(" \U0001f600_\x1c\x1f."), [" \U0001f600_\x1c\x1f."])


class Merging(WithFolder):
    def test_ids_of_bytes_and_merges(self):
        """Bytes that print come first, then the others; a merge has id 256 + its line; end of text is last."""
        bpe = self.bpe()
        self.assertEqual(bpe.encode("!~"), [0, 93])
        self.assertEqual(bpe.token_bytes[94], b"\xa1")
        self.assertEqual([bpe.token_bytes[i] for i in (187, 188, 220, 221, 255)],
                         [b"\xff", b"\0", b" ", b"\x7f", b"\xad"])
        self.assertEqual(bpe.encode("low"), [257])
        self.assertEqual(bpe.end_of_text, 264)
        self.assertEqual(bpe.vocab_size, 265)
        self.assertEqual(bpe.token_bytes[258], b" low")

    def test_earliest_merge_first(self):
        """The order of the list decides, not the position: " lower" is " low" + "er", never " " + "lower"."""
        self.assertEqual(self.bpe().encode("lower lower"), [260, 258, 259])
        bpe = self.bpe("b c\na b\n")
        self.assertEqual(bpe.encode("abc"), [bpe.encode("a")[0], 256])

    def test_repeated_pairs_from_the_left(self):
        """Five a: aa aa a, then aaaa a."""
        bpe = self.bpe()
        self.assertEqual(bpe.encode("aaaaa"), [263, bpe.encode("a")[0]])
        self.assertEqual(bpe.encode("aaa"), [262, bpe.encode("a")[0]])

    def test_merges_stay_inside_a_piece(self):
        """A text of several pieces is the pieces one by one, and bytes of a character may merge."""
        bpe = self.bpe()
        self.assertEqual(bpe.encode("a a"), bpe.encode("a") + bpe.encode(" a"))
        self.assertEqual(bpe.encode("\u00e9"), [261])

    def test_every_text_comes_back(self):
        """decode(encode(x)) = x for any characters, the special token's text and bytes that are no UTF-8."""
        bpe = self.bpe()
        texts = ["", "\0\x7f\r\n", "na\u00efve \u4e2d\u6587 \U0001f469\u200d\U0001f467", "<|endoftext|>", "a" * 3000]
        for text in texts:
            tokens = bpe.encode(text)
            self.assertNotIn(bpe.end_of_text, tokens)
            self.assertEqual(bpe.decode(tokens).decode("utf-8"), text)
        broken = bytes(range(256)) * 2
        self.assertEqual(bpe.decode(bpe.encode(broken.decode("utf-8", "surrogateescape"))), broken)

    def test_cache_is_bounded(self):
        """More pieces than the cache holds give the same tokens."""
        bpe = self.bpe()
        text = " ".join("low%d" % i for i in range(100))
        expected = bpe.encode(text)
        small = self.bpe()
        small.CACHE_PIECES = 3
        self.assertEqual(small.encode(text), expected)
        self.assertLessEqual(len(small._cache), 3)

    def test_damaged_lists_are_named(self):
        """Not a merge list, a merge of unknown tokens, a merge twice, no merges: ValueError with file and line."""
        for content, words in ((b"\xff\xfe\0", "not UTF-8"), ("{}\n", "line 1"), ("l o\nl o\n", "exists already"),
                               ("#version: 0.2\nl o\nx yz\n", "line 3"), ("", "no merges"), ("l o w\n", "line 1")):
            with self.assertRaisesRegex(ValueError, words):
                self.bpe(content)

    def test_windows_line_ends(self):
        """A list with CR LF is the same list."""
        self.assertEqual(self.bpe(MERGES.replace("\n", "\r\n")).encode("lower"), [260])


class Scripts(WithFolder):
    def test_tokenizer_file(self):
        """Header and entries of the file that llm.c reads."""
        content = tokenizer_bytes(self.bpe())
        self.assertEqual(struct.unpack("<256I", content[:1024]), (20240328, 2, 265, 264) + (0,) * 252)
        at, tokens = 1024, []
        while at < len(content):
            tokens.append(content[at + 1:at + 1 + content[at]])
            at += 1 + content[at]
        self.assertEqual(tokens, self.bpe().token_bytes)
        vocab, out = self.file("vocab.bpe", MERGES), self.path("tokenizer.bin")
        self.assertEqual(run("make_tokenizer.py", vocab, out)[0], 0)
        with open(out, "rb") as file:
            self.assertEqual(file.read(), content)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["tokenizer.bin", "vocab.bpe"])

    def test_token_too_long_for_the_tokenizer_file(self):
        """The file has one byte for the length of a token."""
        merges, word = [], "a"
        for _ in range(8):
            merges.append("%s %s\n" % (word, word))
            word += word
        with self.assertRaisesRegex(ValueError, "longer than 255"):
            tokenizer_bytes(self.bpe("".join(merges)))

    def test_command_line(self):
        """encode, --count and decode, from a file and from standard input, are inverse to each other."""
        vocab, text = self.file("vocab.bpe", MERGES), self.file("text", b"lower\xff low\n")
        code, ids, _ = run("gpt2_bpe.py", vocab, "encode", text)
        self.assertEqual((code, ids.split()[0]), (0, b"260"))
        self.assertEqual(run("gpt2_bpe.py", vocab, "encode", stdin=b"lower\xff low\n")[1], ids)
        self.assertEqual(run("gpt2_bpe.py", vocab, "encode", "--count", text)[1], b"%d\n" % len(ids.split()))
        self.assertEqual(run("gpt2_bpe.py", vocab, "decode", stdin=ids)[1], b"lower\xff low\n")

    def test_command_line_errors(self):
        """One line on stderr and exit code 1."""
        vocab = self.file("vocab.bpe", MERGES)
        for arguments, stdin in ((("gpt2_bpe.py", self.path("none"), "encode"), b""),
                                 (("gpt2_bpe.py", vocab, "decode"), b"265"),
                                 (("gpt2_bpe.py", vocab, "decode"), b"1 x"),
                                 (("gpt2_bpe.py", vocab, "encode", self.path("none")), b""),
                                 (("make_tokenizer.py", self.path("none"), self.path("out")), b""),
                                 (("make_tokenizer.py", vocab, self.path("none/out")), b"")):
            code, out, error = run(*arguments, stdin=stdin)
            self.assertEqual((code, out), (1, b""), arguments)
            self.assertRegex(error, r"\Aerror: [^\n]+\n\Z")


@unittest.skipUnless(TEST_DATA, "LLMC_TEST_DATA is not set: the folder with gpt2_vocab.bpe and tinyshakespeare.txt")
class RealData(WithFolder):
    @classmethod
    def setUpClass(cls):
        cls.vocab = os.path.join(TEST_DATA, "gpt2_vocab.bpe")
        cls.text = os.path.join(TEST_DATA, "tinyshakespeare.txt")
        cls.gpt2 = Gpt2Bpe(cls.vocab)

    def test_known_ids(self):
        """Published ids of GPT-2."""
        self.assertEqual(self.gpt2.vocab_size, 50257)
        self.assertEqual(self.gpt2.end_of_text, 50256)
        self.assertEqual(self.gpt2.encode("Hello world"), [15496, 995])
        self.assertEqual(self.gpt2.encode(" the quick brown fox"), [262, 2068, 7586, 21831])

    def test_tiny_shakespeare(self):
        """The whole text has the published number of tokens and comes back."""
        with open(self.text, "rb") as file:
            content = file.read()
        tokens = self.gpt2.encode(content.decode("utf-8"))
        self.assertEqual(len(tokens), 338025)
        self.assertEqual(self.gpt2.decode(tokens), content)

    def test_token_files_of_llmc(self):
        """prepare_text.py makes llm.c's two files, byte for byte."""
        code, _, error = run("prepare_text.py", self.text, "--bpe", self.vocab, "--documents", "sections",
                             "--val-first", "32768", "--out", self.path("ts"))
        self.assertEqual((code, error), (0, ""))
        for part, expected in (("train", "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8"),
                               ("val", "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62")):
            with open(self.path("ts_%s.bin" % part), "rb") as file:
                self.assertEqual(hashlib.sha256(file.read()).hexdigest(), expected)


if __name__ == "__main__":
    unittest.main()
