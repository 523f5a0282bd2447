// tokenizer.h -- tokens to text, and a prompt to tokens. Three kinds:
//   file     llm.c's tokenizer file: 256 uint32 header {20240328, version, V, end-of-text id (version 2), 0...}, then
//   for each
//            token one length byte and that many bytes. Version 1 has no end-of-text id: V must be 50257, it is 50256.
//   bytes    token = byte; the default for a vocabulary of 256
//   numbers  no file and another vocabulary: text is token numbers with blanks between
// Encoding needs no merge list: in GPT-2 the rank of a merge is the order of the ids, so the merge to do next is the
// pair of neighbours whose joined bytes are the token with the lowest id. Text is first cut into words by GPT-2's rule
// (contraction; blank + letters; blank + digits; blank + other signs; blanks), here exact for ASCII; other characters
// count as letters. For training data use dev/data, which has the whole rule. Source: Sennrich et al. 2016 (BPE),
// Radford et al. 2019.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "llmc/check.h"
#include "llmc/file.h"
#include "llmc/option_text.h"

constexpr uint32_t kTokenizerMagic = 20240328;

/// Text that is safe to print on a terminal: newline, tab and valid UTF-8 stay, control characters (an escape sequence
/// could rewrite the screen) and bytes that are not UTF-8 become \xHH. Use on a whole text: a token may hold half a
/// character.
inline std::string printable_text(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const unsigned char lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : (lead >> 4) == 0xe          ? 3
                          : (lead >> 3) == 0x1e         ? 4
                                                        : 0;
    bool valid = length > 0 && i + length <= text.size();
    uint32_t point = length <= 1 ? lead : lead & (0x7fu >> length);
    for (size_t k = 1; valid && k < length; k++) {
      const unsigned char next = static_cast<unsigned char>(text[i + k]);
      valid = (next & 0xc0) == 0x80;
      point = point << 6 | (next & 0x3fu);
    }
    constexpr uint32_t kSmallest[5] = {0, 0, 0x80, 0x800, 0x10000};  // smaller ones are overlong forms
    valid = valid && point >= kSmallest[length] && point <= 0x10ffff && (point < 0xd800 || point > 0xdfff);
    const bool control = (point < 32 && point != '\n' && point != '\t') || (point >= 127 && point < 0xa0);
    const size_t taken = valid ? length : 1;
    if (valid && !control) {
      result.append(text, i, taken);
    } else {
      for (size_t k = 0; k < taken; k++) result += format_text("\\x%02x", static_cast<unsigned char>(text[i + k]));
    }
    i += taken;
  }
  return result;
}

class Tokenizer {
 public:
  /// `path`: an llm.c tokenizer file, or "" for bytes (vocab 256) or numbers (any other). User error when the file is
  /// missing, foreign, cut, or not made for `vocab` tokens.
  static Tokenizer open(const std::string& path, int vocab) {
    Tokenizer tokenizer;
    if (!path.empty()) {
      tokenizer.kind_ = Kind::kFile;
      tokenizer.read(path, vocab);
    } else if (vocab == 256) {
      tokenizer.kind_ = Kind::kBytes;
      for (int byte = 0; byte < 256; byte++) tokenizer.tokens_.push_back(std::string(1, static_cast<char>(byte)));
    } else {
      tokenizer.vocab_ = vocab;
    }
    return tokenizer;
  }

  /// Id that separates documents, -1 if there is none.
  int end_of_text() const { return end_of_text_; }

  /// The bytes of a token; see printable_text before printing. A number and a blank when there is no tokenizer; "" for
  /// an id that the tokenizer does not have.
  std::string decode(int token) const {
    if (kind_ == Kind::kNumbers) return std::to_string(token) + " ";
    const bool known = token >= 0 && static_cast<size_t>(token) < tokens_.size();
    return known ? tokens_[static_cast<size_t>(token)] : "";
  }

  /// Tokens of a text. User error for a byte that has no token, or, without tokenizer, for anything but ids.
  std::vector<int> encode(const std::string& text) const {
    if (kind_ == Kind::kNumbers) return encode_numbers(text);
    std::vector<int> tokens;
    if (kind_ == Kind::kBytes) {
      for (unsigned char byte : text) tokens.push_back(byte);
      return tokens;
    }
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = word_end(text, begin);
      const std::vector<int> word = encode_word(text.substr(begin, end - begin));
      tokens.insert(tokens.end(), word.begin(), word.end());
      begin = end;
    }
    return tokens;
  }

  /// What generation starts from: the tokens of the prompt; for an empty prompt end-of-text, else a newline, else token
  /// 0.
  std::vector<int> prompt_tokens(const std::string& prompt) const {
    const std::vector<int> tokens = encode(prompt);
    if (!tokens.empty()) return tokens;
    if (end_of_text_ >= 0) return {end_of_text_};
    if (kind_ == Kind::kBytes) return {'\n'};
    return {0};
  }

 private:
  enum class Kind { kFile, kBytes, kNumbers };

  static constexpr uint64_t kHeaderBytes = 256 * sizeof(uint32_t);

  /// Fills tokens_, ids_ and end_of_text_ from a file.
  void read(const std::string& path, int vocab) {
    const std::string content = read_whole_file(path, "tokenizer file");
    const char* name = path.c_str();
    if (content.size() < kHeaderBytes) {
      user_error("%s is %s: %zu bytes, a tokenizer file starts with a header of %zu", name,
                 content.empty() ? "empty" : "cut short", content.size(), static_cast<size_t>(kHeaderBytes));
    }
    uint32_t header[256];
    memcpy(header, content.data(), sizeof(header));
    if (header[0] != kTokenizerMagic) {
      user_error("%s is not a tokenizer file: it starts with %u, expected %u", name, header[0], kTokenizerMagic);
    }
    if (header[1] != 1 && header[1] != 2) user_error("%s has version %u, expected 1 or 2", name, header[1]);
    if (header[2] != static_cast<uint32_t>(vocab)) {
      user_error("%s holds %u tokens, the model has %d; use the tokenizer that the training data was made with", name,
                 header[2], vocab);
    }
    if (header[1] == 1 && vocab != 50257) {
      user_error("%s has version 1, which is for GPT-2's 50257 tokens only; write it as version 2", name);
    }
    const uint32_t end_of_text = header[1] == 1 ? 50256 : header[3];
    if (end_of_text >= header[2]) user_error("%s: end-of-text is token %u of %u", name, end_of_text, header[2]);
    end_of_text_ = static_cast<int>(end_of_text);
    size_t position = kHeaderBytes;
    for (int token = 0; token < vocab; token++) {
      const size_t length = position < content.size() ? static_cast<unsigned char>(content[position]) : 0;
      if (position >= content.size() || position + 1 + length > content.size()) {
        user_error("%s is cut short: it ends in token %d of %d", name, token, vocab);
      }
      if (length == 0) user_error("%s: token %d has no bytes; the file is damaged", name, token);
      tokens_.push_back(content.substr(position + 1, length));
      if (token != end_of_text_) ids_.emplace(tokens_.back(), token);
      position += 1 + length;
    }
    if (position != content.size()) {
      user_error("%s has %zu bytes after its last token; the file is damaged", name, content.size() - position);
    }
  }

  std::vector<int> encode_numbers(const std::string& text) const {
    std::vector<int> tokens;
    for (const std::string& word : option_detail::split(text, ' ')) {
      if (word.empty()) continue;
      const std::string allowed = format_text("a token from 0 to %d, as there is no --tokenizer", vocab_ - 1);
      const int64_t token = option_detail::parse_integer("prompt", word, allowed);
      if (token < 0 || token >= vocab_) user_error("prompt: %s must be %s", word.c_str(), allowed.c_str());
      tokens.push_back(static_cast<int>(token));
    }
    return tokens;
  }

  enum class CharacterClass { kSpace, kLetter, kDigit, kOther };
  static CharacterClass class_of(char c) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte == ' ' || (byte >= 9 && byte <= 13)) return CharacterClass::kSpace;
    if (byte >= 128 || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z')) return CharacterClass::kLetter;
    return byte >= '0' && byte <= '9' ? CharacterClass::kDigit : CharacterClass::kOther;
  }

  /// Where the word that starts at `begin` ends.
  static size_t word_end(const std::string& text, size_t begin) {
    for (const char* contraction : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      if (text.compare(begin, strlen(contraction), contraction) == 0) return begin + strlen(contraction);
    }
    const size_t first = begin + (text[begin] == ' ' && begin + 1 < text.size());
    const CharacterClass kind = class_of(text[first]);
    size_t end = kind == CharacterClass::kSpace ? begin : first;
    const CharacterClass run = kind;
    while (end < text.size() && class_of(text[end]) == run) end++;
    // blanks before a word leave it their last one
    if (run == CharacterClass::kSpace && end < text.size() && end - begin > 1) end--;
    return end;
  }

  /// Byte-pair merges inside one word, lowest id first, leftmost first among equals.
  std::vector<int> encode_word(const std::string& word) const {
    std::vector<std::string> parts;
    for (char c : word) parts.push_back(std::string(1, c));
    while (true) {
      size_t best = parts.size();
      int best_id = INT32_MAX;
      for (size_t i = 0; i + 1 < parts.size(); i++) {
        const auto found = ids_.find(parts[i] + parts[i + 1]);
        if (found != ids_.end() && found->second < best_id) best = i, best_id = found->second;
      }
      if (best == parts.size()) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    std::vector<int> tokens;
    for (const std::string& part : parts) {
      const auto found = ids_.find(part);
      if (found == ids_.end()) user_error("the tokenizer has no token for \"%s\"", printable_text(part).c_str());
      tokens.push_back(found->second);
    }
    return tokens;
  }

  Kind kind_ = Kind::kNumbers;
  int vocab_ = 0;
  int end_of_text_ = -1;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int> ids_;
};
