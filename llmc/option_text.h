// option_text.h -- option values as text: strict parsing, legal ranges, quoting, nearest name, wrapping. Used by
// options.h.
//
// No atoi: "12abc", "", " 7", "nan", "0x10" and a number that does not fit are user errors, never a value. Reals are
// written with the fewest digits that read back to the same bits, texts are quoted where reading them back would change
// them, so a saved configuration gives exactly the values it was saved from.
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "llmc/check.h"

/// Legal numbers: minimum <= x <= maximum, ends excluded where said so.
struct OptionRange {
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false, below_maximum = false;

  static OptionRange at_least(double minimum) { return between(minimum, std::numeric_limits<double>::infinity()); }
  static OptionRange between(double minimum, double maximum) {
    OptionRange range;
    range.minimum = minimum;
    range.maximum = maximum;
    return range;
  }
  static OptionRange above(double minimum) {
    OptionRange range = at_least(minimum);
    range.above_minimum = true;
    return range;
  }
  /// minimum <= x < maximum
  static OptionRange from_to_below(double minimum, double maximum) {
    OptionRange range = between(minimum, maximum);
    range.below_maximum = true;
    return range;
  }

  bool contains(double x) const {
    return (above_minimum ? x > minimum : x >= minimum) && (below_maximum ? x < maximum : x <= maximum);
  }
  /// For --help: ">= 1", "> 0", "0..1", ">= 0, < 1".
  std::string symbols() const {
    if (!above_minimum && !below_maximum && !std::isinf(maximum)) return format_text("%.10g..%.10g", minimum, maximum);
    const std::string low = format_text("%s %.10g", above_minimum ? ">" : ">=", minimum);
    return std::isinf(maximum) ? low : low + format_text(", %s %.10g", below_maximum ? "<" : "<=", maximum);
  }
  /// For messages: "it must be ...".
  std::string text() const {
    const std::string low = format_text("%s %.10g", above_minimum ? "above" : "at least", minimum);
    const std::string high = format_text("%s %.10g", below_maximum ? "below" : "at most", maximum);
    if (std::isinf(maximum)) return std::isinf(minimum) ? "any number" : low;
    if (!above_minimum && !below_maximum) return format_text("from %.10g to %.10g", minimum, maximum);
    return low + " and " + high;
  }
};

namespace option_detail {

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// Levenshtein distance: fewest insertions, deletions and replacements that turn a into b.
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); j++) row[j] = j;
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

/// The name nearest to `wrong` (a name that continues it counts as near), or "" when none is near.
inline std::string nearest(const std::string& wrong, const std::vector<std::string>& names) {
  std::string best;
  size_t best_distance = std::max<size_t>(1, wrong.size() / 3) + 1;
  for (const std::string& name : names) {
    const bool continues = wrong.size() >= 3 && name.compare(0, wrong.size(), wrong) == 0;
    const size_t distance = continues ? 1 : edit_distance(wrong, name);
    if (distance < best_distance) best = name, best_distance = distance;
  }
  return best;
}

/// Fewest digits that read back to the same double.
inline std::string shortest_real(double value) {
  for (int digits = 1; digits < 17; digits++) {
    const std::string text = format_text("%.*g", digits, value);
    if (strtod(text.c_str(), nullptr) == value) return text;
  }
  return format_text("%.17g", value);
}

inline std::string trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

/// Control bytes, quotes and backslashes as in C: \n \t \" \\ \xHH.
inline std::string escape(const std::string& text) {
  std::string escaped;
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      escaped += '\\', escaped += static_cast<char>(c);
    } else if (c == '\n') {
      escaped += "\\n";
    } else if (c == '\t') {
      escaped += "\\t";
    } else if (c < 32 || c == 127) {
      escaped += format_text("\\x%02x", c);
    } else {
      escaped += static_cast<char>(c);
    }
  }
  return escaped;
}

/// Text as it stands in a configuration file: as it is, or quoted where reading it back would change it.
inline std::string quote_if_needed(const std::string& text) {
  bool plain = !text.empty() && trim(text) == text && text[0] != '"';
  for (unsigned char c : text) plain = plain && c >= 32 && c != 127;
  return plain ? text : "\"" + escape(text) + "\"";
}

/// A user's text in a message: quoted, one line, at most 80 bytes of it.
inline std::string shown(const std::string& text) {
  return "\"" + escape(text.substr(0, 80)) + (text.size() > 80 ? "...\"" : "\"");
}

/// A whole decimal number that fits int64_t; nothing before or after it. `where` starts the message.
inline int64_t parse_integer(const std::string& where, const std::string& text, const std::string& allowed) {
  const bool starts_well = !text.empty() && text.find_first_not_of("+-0123456789") == std::string::npos;
  errno = 0;
  char* end = nullptr;
  const long long value = starts_well ? strtoll(text.c_str(), &end, 10) : 0;
  if (!starts_well || *end != '\0') {
    user_error("%s %s is not a whole number; it must be %s", where.c_str(), shown(text).c_str(), allowed.c_str());
  }
  if (errno == ERANGE) user_error("%s %s is too large; it must be %s", where.c_str(), text.c_str(), allowed.c_str());
  return value;
}

/// A finite decimal number; no nan, inf, hexadecimal, overflow or underflow.
inline double parse_real(const std::string& where, const std::string& text, const std::string& allowed) {
  const bool starts_well = !text.empty() && text.find_first_not_of("+-.0123456789eE") == std::string::npos;
  errno = 0;
  char* end = nullptr;
  const double value = starts_well ? strtod(text.c_str(), &end) : 0.0;
  if (!starts_well || end == text.c_str() || *end != '\0') {
    user_error("%s %s is not a number; it must be %s", where.c_str(), shown(text).c_str(), allowed.c_str());
  }
  if (errno == ERANGE) {
    user_error("%s %s is too large or too small for a double; it must be %s", where.c_str(), text.c_str(),
               allowed.c_str());
  }
  return value;
}

/// The inverse of quote_if_needed.
inline std::string unquote(const std::string& where, const std::string& text) {
  if (text.empty() || text[0] != '"') return text;
  std::string plain;
  for (size_t i = 1; i < text.size(); i++) {
    if (text[i] == '"' && i + 1 == text.size()) return plain;
    if (text[i] == '"') break;
    if (text[i] != '\\') {
      plain += text[i];
      continue;
    }
    const char escape = ++i < text.size() ? text[i] : '\0';
    if (escape == 'n') {
      plain += '\n';
    } else if (escape == 't') {
      plain += '\t';
    } else if (escape == '"' || escape == '\\') {
      plain += escape;
    } else if (escape == 'x' && i + 2 < text.size() && isxdigit(text[i + 1]) && isxdigit(text[i + 2])) {
      plain += static_cast<char>(strtol(text.substr(i + 1, 2).c_str(), nullptr, 16));
      i += 2;
    } else {
      user_error("%s %s has an unknown escape; use \\n \\t \\\" \\\\ or \\xHH", where.c_str(), shown(text).c_str());
    }
  }
  user_error("%s %s: the closing quote must be the last character", where.c_str(), shown(text).c_str());
}

/// "a|b|c" -> "a, b or c"
inline std::string in_words(const std::vector<std::string>& choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); i++) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i];
  }
  return text;
}

/// Breaks text at blanks into lines of at most `width` bytes.
inline std::vector<std::string> wrap(const std::string& text, size_t width) {
  std::vector<std::string> lines(1);
  for (const std::string& word : split(text, ' ')) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

}  // namespace option_detail
