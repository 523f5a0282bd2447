// test_tokenizer.cpp -- decoding and encoding with llm.c tokenizer files and without, bad files, and safe printing.
#include "llmc/tokenizer.h"

#include <gtest/gtest.h>

#include "test/host_test.h"

namespace {

std::string tokenizer_file(const std::vector<std::string>& tokens, uint32_t version = 2, uint32_t end_of_text = 0,
                           uint32_t magic = kTokenizerMagic) {
  const uint32_t header[256] = {magic, version, static_cast<uint32_t>(tokens.size()), end_of_text};
  std::string content(reinterpret_cast<const char*>(header), sizeof(header));
  for (const std::string& token : tokens) content += static_cast<char>(token.size()) + token;
  return content;
}

/// 256 bytes, some merges in the order of their ids, and an end-of-text token.
std::vector<std::string> small_vocabulary() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; byte++) tokens.push_back(std::string(1, static_cast<char>(byte)));
  for (const char* merged :
       {"he", " t", "in", "an", " the", "'s", " a", "ll", "'ll", "hell", "ing", "  ", "\n\n", "12", "th"}) {
    tokens.push_back(merged);
  }
  tokens.push_back("<|endoftext|>");
  return tokens;
}
constexpr int kSmallVocabulary = 272;

std::string pieces(const Tokenizer& tokenizer, const std::string& text) {
  std::string result;
  for (int token : tokenizer.encode(text)) result += (result.empty() ? "" : "|") + tokenizer.decode(token);
  return result;
}

}  // namespace

// A version 2 file decodes each token to its bytes (zero bytes and half characters too) and has an end-of-text id.
TEST(Tokenizer, DecodesFile) {
  const TemporaryFolder folder;
  const std::vector<std::string> tokens = {"a", "b", std::string("\0", 1), "\xc3", std::string(255, 'x'), " end"};
  const Tokenizer tokenizer = Tokenizer::open(folder.write("t.bin", tokenizer_file(tokens, 2, 5)), 6);
  for (int i = 0; i < 6; i++) EXPECT_EQ(tokenizer.decode(i), tokens[static_cast<size_t>(i)]);
  EXPECT_EQ(tokenizer.end_of_text(), 5);
  EXPECT_EQ(tokenizer.decode(6), "");
  EXPECT_EQ(tokenizer.decode(-1), "");
  EXPECT_EQ(tokenizer.prompt_tokens(""), std::vector<int>{5});
}

// A version 1 file is GPT-2's: 50257 tokens, the last is end-of-text.
TEST(Tokenizer, VersionOne) {
  const TemporaryFolder folder;
  std::vector<std::string> tokens;
  for (int i = 0; i < 50257; i++) tokens.push_back(std::to_string(i));
  const Tokenizer tokenizer = Tokenizer::open(folder.write("t.bin", tokenizer_file(tokens, 1)), 50257);
  EXPECT_EQ(tokenizer.end_of_text(), 50256);
  EXPECT_EQ(tokenizer.decode(50000), "50000");
  const std::string small = folder.write("s.bin", tokenizer_file({"a", "b"}, 1));
  EXPECT_TRUE(contains(user_error_text([&] { Tokenizer::open(small, 2); }), "version 1, which is for GPT-2's 50257"));
}

// Without a file and with 256 tokens, a token is a byte both ways.
TEST(Tokenizer, Bytes) {
  const Tokenizer tokenizer = Tokenizer::open("", 256);
  std::string text;
  for (int byte = 0; byte < 256; byte++) text += static_cast<char>(byte);
  const std::vector<int> tokens = tokenizer.encode(text);
  std::string decoded;
  for (int token : tokens) decoded += tokenizer.decode(token);
  EXPECT_EQ(decoded, text);
  EXPECT_EQ(tokens[200], 200);
  EXPECT_EQ(tokenizer.end_of_text(), -1);
  EXPECT_EQ(tokenizer.prompt_tokens(""), std::vector<int>{'\n'});
  EXPECT_EQ(tokenizer.prompt_tokens("ab"), (std::vector<int>{'a', 'b'}));
}

// Without a file and with another vocabulary, text is token numbers.
TEST(Tokenizer, Numbers) {
  const Tokenizer tokenizer = Tokenizer::open("", 50257);
  EXPECT_EQ(tokenizer.decode(15496), "15496 ");
  EXPECT_EQ(tokenizer.encode(" 15496  995"), (std::vector<int>{15496, 995}));
  EXPECT_EQ(tokenizer.prompt_tokens(""), std::vector<int>{0});
  EXPECT_EQ(user_error_text([&] { tokenizer.encode("1 Hello"); }),
            "prompt \"Hello\" is not a whole number; it must be a token from 0 to 50256, as there is no --tokenizer");
  EXPECT_TRUE(
      contains(user_error_text([&] { tokenizer.encode("50257"); }), "prompt: 50257 must be a token from 0 to 50256"));
}

// Byte-pair merges: lowest id first, leftmost first, never across words; what is encoded decodes to the same bytes.
TEST(Tokenizer, Encodes) {
  const TemporaryFolder folder;
  const std::string path = folder.write("t.bin", tokenizer_file(small_vocabulary(), 2, 271));
  const Tokenizer tokenizer = Tokenizer::open(path, kSmallVocabulary);
  EXPECT_EQ(pieces(tokenizer, "the"), "t|he");
  EXPECT_EQ(pieces(tokenizer, "see the hen"), "s|e|e| the| |he|n");
  EXPECT_EQ(pieces(tokenizer, "hello"), "hell|o");
  EXPECT_EQ(pieces(tokenizer, "lll"), "ll|l");
  EXPECT_EQ(pieces(tokenizer, "she'll hell's"), "s|he|'ll| |hell|'s");
  EXPECT_EQ(pieces(tokenizer, "a   the"), "a|  | the");
  EXPECT_EQ(pieces(tokenizer, "x  "), "x|  ");
  EXPECT_EQ(pieces(tokenizer, "\n\n\nthe\n\n"), "\n\n|\n|t|he|\n\n");
  EXPECT_EQ(pieces(tokenizer, "a12in3.12"), "a|12|in|3|.|12");
  EXPECT_EQ(pieces(tokenizer, "an' in"), "an|'| |in");
  EXPECT_EQ(tokenizer.encode(""), std::vector<int>{});
  const Tokenizer end = Tokenizer::open(folder.write("e.bin", tokenizer_file({"a", "b", "ab"}, 2, 2)), 3);
  EXPECT_EQ(end.encode("ab"), (std::vector<int>{0, 1})) << "text must not make end-of-text";
  const std::string text = "  'tis \xc3\xa9t\xc3\xa9 12\t\r\n  the end' \xff\x00 ";
  std::string decoded;
  for (int token : tokenizer.encode(text)) decoded += tokenizer.decode(token);
  EXPECT_EQ(decoded, text);
  const Tokenizer letters = Tokenizer::open(folder.write("l.bin", tokenizer_file({"a", "b", "e"}, 2, 2)), 3);
  EXPECT_EQ(user_error_text([&] { letters.encode("abc"); }), "the tokenizer has no token for \"c\"");
}

// Missing, empty, cut, foreign, wrong version, wrong vocabulary, damaged: one message with the file and what was
// expected.
TEST(Tokenizer, BadFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "t.bin", good = tokenizer_file({"ab", "c", "def"});
  const auto message = [&](const std::string& content) {
    folder.write("t.bin", content);
    return user_error_text([&] { Tokenizer::open(path, 3); });
  };
  EXPECT_EQ(user_error_text([&] { Tokenizer::open(folder / "none", 3); }),
            "cannot open tokenizer file " + folder / "none" + ": No such file or directory");
  EXPECT_EQ(message(""), path + " is empty: 0 bytes, a tokenizer file starts with a header of 1024");
  EXPECT_EQ(message(good.substr(0, 900)),
            path + " is cut short: 900 bytes, a tokenizer file starts with a header of 1024");
  for (size_t cut = 1024; cut < good.size(); cut++) {
    EXPECT_TRUE(contains(message(good.substr(0, cut)), " is cut short: it ends in token ")) << cut;
  }
  EXPECT_EQ(message(good.substr(0, good.size() - 1)), path + " is cut short: it ends in token 2 of 3");
  EXPECT_EQ(message(good + "xy"), path + " has 2 bytes after its last token; the file is damaged");
  EXPECT_EQ(message(tokenizer_file({"ab", "", "def"})), path + ": token 1 has no bytes; the file is damaged");
  EXPECT_EQ(message(tokenizer_file({"ab", "c", "def"}, 2, 0, 20240520)),
            path + " is not a tokenizer file: it starts with 20240520, expected 20240328");
  EXPECT_EQ(message(tokenizer_file({"ab", "c", "def"}, 3)), path + " has version 3, expected 1 or 2");
  EXPECT_EQ(message(tokenizer_file({"ab", "c", "def"}, 2, 3)), path + ": end-of-text is token 3 of 3");
  EXPECT_EQ(message(tokenizer_file({"ab", "c"})),
            path + " holds 2 tokens, the model has 3; use the tokenizer that the training data was made with");
}

// Text for the terminal: newline, tab and UTF-8 pass, control characters and broken UTF-8 are shown as numbers.
TEST(Tokenizer, PrintableText) {
  EXPECT_EQ(printable_text("plain\n\ttext ~"), "plain\n\ttext ~");
  EXPECT_EQ(printable_text("\x1b[2J\r\x07\x7f"), "\\x1b[2J\\x0d\\x07\\x7f");
  EXPECT_EQ(printable_text(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable_text("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf \xf4\x8f\xbf\xbf"),
            "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf \xf4\x8f\xbf\xbf");
  EXPECT_EQ(printable_text("\xc2\x9b"
                           "31m"),
            "\\xc2\\x9b31m");                                      // C1 control: an escape sequence in one character
  EXPECT_EQ(printable_text("\xc3"), "\\xc3");                      // cut at the end
  EXPECT_EQ(printable_text("\xc3(\xe2\x82"), "\\xc3(\\xe2\\x82");  // cut in the middle and at the end
  EXPECT_EQ(printable_text("\xc0\xaf\xe0\x80\xaf"), "\\xc0\\xaf\\xe0\\x80\\xaf");  // overlong
  EXPECT_EQ(printable_text("\xed\xa0\x80"), "\\xed\\xa0\\x80");                    // surrogate
  EXPECT_EQ(printable_text("\xf4\x90\x80\x80\xff\xf8"),
            "\\xf4\\x90\\x80\\x80\\xff\\xf8");  // beyond U+10FFFF, no lead bytes
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
