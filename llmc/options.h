// options.h -- command line and configuration file from one table.
//
// A row of the table: long name, llm.c's short alias, a field of a plain struct (its type is the option's type, its
// initial value the default), legal range or choices, placeholder and help text, group. The table drives parsing,
// checking, --help, and the saved configuration, so these cannot disagree.
//   program --steps 100 -l 3e-4 --lr-schedule=cosine --config run/config.txt
// Precedence: defaults < --config FILE < flags, wherever --config stands. An option given twice in one place is an
// error. The file holds lines `name = value` (`#` starts a comment line); text with blanks at its ends or control bytes
// is quoted as in C ("a\n"). Numbers are written with the fewest digits that read back to the same bits. Every mistake
// is a user error that names the option, the value and what is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "llmc/check.h"
#include "llmc/file.h"
#include "llmc/option_text.h"

/// One row. `alias` is llm.c's name without the dash ("nk"), or "". A bool takes 0 or 1. `choices` ("gpipe|1f1b"): the
/// legal texts of a string option, "" = any text. `placeholder`: what --help shows for the value. `bare`: a bool that
/// may stand without a value, which then is 1.
template <class Values>
struct Option {
  using Field = std::variant<bool Values::*, int Values::*, int64_t Values::*, double Values::*, std::string Values::*>;
  const char* group;
  const char* name;
  const char* alias;
  Field field;
  const char* placeholder;
  OptionRange range;
  const char* choices;
  const char* help;
  bool bare = false;
};

/// What the command line asks for besides values.
struct CommandLine {
  bool help = false;
  std::string config_file;
};

/// The table of one program. Rows of a group must be adjacent. The options --config FILE and --help belong to every
/// table.
template <class Values>
class OptionTable {
 public:
  OptionTable(std::string usage, std::vector<Option<Values>> rows) : usage_(std::move(usage)), rows_(std::move(rows)) {
    std::set<std::string> names = {"config", "help"};
    for (const auto& row : rows_) {
      const bool new_name = names.insert(row.name).second;
      const bool new_alias = !*row.alias || names.insert(row.alias).second;
      assert(new_name && new_alias && "two options of one name");
    }
  }

  const std::vector<Option<Values>>& rows() const { return rows_; }

  /// Sets `values` (assumed to hold the defaults) from the configuration file and then from the flags.
  /// User error for anything that is not as the table says. With --help the rest is still checked.
  CommandLine parse(int argc, const char* const* argv, Values& values) const {
    CommandLine command_line;
    std::vector<std::pair<const Option<Values>*, std::string>> given;
    std::set<std::string> seen;
    for (int i = 1; i < argc; i++) {
      std::string word = argv[i], value;
      const size_t equals = word.compare(0, 2, "--") == 0 ? word.find('=') : std::string::npos;
      if (equals != std::string::npos) {
        value = word.substr(equals + 1);
        word.erase(equals);
      }
      const Option<Values>* row = find_flag(word);
      const std::string name = row ? row->name : word.substr(2);
      if (!seen.insert(name).second) user_error("--%s is given twice; give it once", name.c_str());
      if (name == "help") {
        if (equals != std::string::npos) user_error("--help takes no value");
        command_line.help = true;
        continue;
      }
      if (equals == std::string::npos) {
        const bool has_value = i + 1 < argc && !is_flag(argv[i + 1]);
        if (!has_value && !(row && row->bare)) user_error("%s needs a value; see --help", word.c_str());
        value = has_value ? argv[++i] : "1";
      }
      if (name == "config") {
        if (value.empty()) user_error("--config \"\" names no file; leave it out or give a file");
        command_line.config_file = value;
      } else {
        given.emplace_back(row, value);
      }
    }
    if (!command_line.config_file.empty()) read_config(command_line.config_file, values);
    for (const auto& [row, value] : given) set(*row, shown_name(*row), value, values);
    return command_line;
  }

  /// Sets `values` from a configuration file; messages carry FILE:LINE.
  void read_config(const std::string& path, Values& values) const {
    const std::string content = read_whole_file(path, "configuration file");
    std::set<std::string> seen;
    int number = 0;
    for (const std::string& raw : option_detail::split(content, '\n')) {
      number++;
      const std::string line = option_detail::trim(raw);
      if (line.empty() || line[0] == '#') continue;
      const std::string place = format_text("%s:%d: ", path.c_str(), number);
      const size_t equals = line.find('=');
      if (equals == std::string::npos)
        user_error("%s%s is not `name = value`", place.c_str(), option_detail::shown(line).c_str());
      const std::string name = option_detail::trim(line.substr(0, equals));
      const Option<Values>* row = find_name(name);
      if (!row)
        user_error("%sunknown option %s%s", place.c_str(), option_detail::escape(name).c_str(),
                   suggestion(name, "").c_str());
      if (!seen.insert(name).second) user_error("%s%s is given twice; give it once", place.c_str(), name.c_str());
      const std::string value = option_detail::trim(line.substr(equals + 1));
      if (value.empty()) user_error("%s%s has no value; write \"\" for an empty text", place.c_str(), name.c_str());
      set(*row, place + name, option_detail::unquote(place + name, value), values);
    }
  }

  /// The configuration file that gives `values`: every option, grouped.
  std::string config_text(const Values& values) const {
    std::string text, group;
    for (const auto& row : rows_) {
      if (group != row.group) text += (text.empty() ? "# " : "\n# ") + (group = row.group) + "\n";
      const std::string value = value_text(row, values);
      const bool is_text = std::holds_alternative<std::string Values::*>(row.field);
      text += std::string(row.name) + " = " + (is_text ? option_detail::quote_if_needed(value) : value) + "\n";
    }
    return text;
  }

  /// What --help prints: groups, names, aliases, meaning, range, default. At most 110 columns.
  std::string help_text() const {
    std::string text = usage_, group;
    const Values defaults{};
    for (const auto& row : rows_) {
      if (group != row.group) text += "\n" + (group = row.group) + "\n";
      const std::string alias = *row.alias ? std::string(", -") + row.alias : "";
      const std::string value = value_text(row, defaults);
      const bool is_number = !std::holds_alternative<bool Values::*>(row.field) &&
                             !std::holds_alternative<std::string Values::*>(row.field);
      text += help_entry("--" + std::string(row.name) + alias + " " + row.placeholder,
                         std::string(row.help) + " [" + (value.empty() ? "none" : value) +
                             (is_number ? "; " + row.range.symbols() : "") + "]");
    }
    text += "\nGeneral\n";
    text += help_entry("--config FILE", "read options from a file of `name = value` lines; flags win over the file");
    text += help_entry("--help", "print this text");
    return text;
  }

 private:
  static constexpr size_t kHelpColumn = 36;
  static constexpr size_t kHelpWidth = 110;

  static std::string help_entry(std::string left, const std::string& right) {
    std::string text = "  " + left;
    for (const std::string& line : option_detail::wrap(right, kHelpWidth - kHelpColumn)) {
      const size_t column = text.size() - (text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1);
      const bool same_line = column + 2 <= kHelpColumn;
      text += (same_line ? "" : "\n") + std::string(kHelpColumn - (same_line ? column : 0), ' ') + line;
    }
    return text + "\n";
  }

  const Option<Values>* find_name(const std::string& name) const {
    for (const auto& row : rows_) {
      if (name == row.name) return &row;
    }
    return nullptr;
  }
  const Option<Values>* find_alias(const std::string& alias) const {
    for (const auto& row : rows_) {
      if (*row.alias && alias == row.alias) return &row;
    }
    return nullptr;
  }
  bool is_flag(const std::string& word) const {
    if (word == "--help" || word == "--config") return true;
    if (word.size() > 2 && word.compare(0, 2, "--") == 0) return find_name(word.substr(2, word.find('=') - 2));
    return word.size() > 1 && word[0] == '-' && find_alias(word.substr(1));
  }
  /// The row of `--name` or `-alias`; nullptr for --help and --config; user error for anything else.
  const Option<Values>* find_flag(const std::string& word) const {
    if (word == "--help" || word == "--config") return nullptr;
    const bool is_long = word.size() > 2 && word.compare(0, 2, "--") == 0;
    const bool is_short = !is_long && word.size() > 1 && word[0] == '-' && word != "--";
    const Option<Values>* row = is_long ? find_name(word.substr(2)) : is_short ? find_alias(word.substr(1)) : nullptr;
    if (row) return row;
    if (!is_long && !is_short)
      user_error("%s is not an option; options start with --, see --help", option_detail::shown(word).c_str());
    // one or two letters are near every alias: a guess would mislead
    const std::string hint =
        is_long || word.size() > 3 ? suggestion(word.substr(is_long ? 2 : 1), "--") : "; see --help";
    user_error("unknown option %s%s", option_detail::escape(word).c_str(), hint.c_str());
  }
  std::string suggestion(const std::string& wrong, const char* dashes) const {
    if (wrong == "config" || wrong == "help") return "; it belongs on the command line";
    std::vector<std::string> names;
    if (*dashes) names = {"config", "help"};
    for (const auto& row : rows_) names.push_back(row.name);
    const std::string name = option_detail::nearest(wrong, names);
    return name.empty() ? "; see --help" : "; did you mean " + (dashes + name) + "?";
  }

  static std::string shown_name(const Option<Values>& row) {
    return "--" + std::string(row.name) + (*row.alias ? std::string(" (-") + row.alias + ")" : "");
  }

  static std::string value_text(const Option<Values>& row, const Values& values) {
    if (auto* field = std::get_if<bool Values::*>(&row.field)) return values.**field ? "1" : "0";
    if (auto* field = std::get_if<int Values::*>(&row.field)) return std::to_string(values.**field);
    if (auto* field = std::get_if<int64_t Values::*>(&row.field)) return std::to_string(values.**field);
    if (auto* field = std::get_if<double Values::*>(&row.field)) return option_detail::shortest_real(values.**field);
    return values.*std::get<std::string Values::*>(row.field);
  }

  /// Checks `text` against the row and stores it. `where` names the option in messages.
  static void set(const Option<Values>& row, const std::string& where, const std::string& text, Values& values) {
    if (auto* field = std::get_if<bool Values::*>(&row.field)) {
      if (text != "0" && text != "1")
        user_error("%s %s is neither 0 nor 1", where.c_str(), option_detail::shown(text).c_str());
      values.** field = text == "1";
    } else if (auto* field = std::get_if<int Values::*>(&row.field)) {
      values.** field = static_cast<int>(checked_integer<int>(row, where, text));
    } else if (auto* field = std::get_if<int64_t Values::*>(&row.field)) {
      values.** field = checked_integer<int64_t>(row, where, text);
    } else if (auto* field = std::get_if<double Values::*>(&row.field)) {
      const double value = option_detail::parse_real(where, text, row.range.text());
      if (!row.range.contains(value)) out_of_range(where, text, row.range.text());
      values.** field = value;
    } else {
      const std::vector<std::string> choices = option_detail::split(row.choices, '|');
      if (*row.choices && std::find(choices.begin(), choices.end(), text) == choices.end()) {
        user_error("%s %s is not known; use %s", where.c_str(), option_detail::shown(text).c_str(),
                   option_detail::in_words(choices).c_str());
      }
      values.*std::get<std::string Values::*>(row.field) = text;
    }
  }

  template <class Integer>
  static int64_t checked_integer(const Option<Values>& row, const std::string& where, const std::string& text) {
    const int64_t value = option_detail::parse_integer(where, text, row.range.text());
    const bool fits = value >= std::numeric_limits<Integer>::min() && value <= std::numeric_limits<Integer>::max();
    if (!row.range.contains(static_cast<double>(value))) out_of_range(where, text, row.range.text());
    if (!fits) {
      out_of_range(where, text,
                   format_text("at most %lld", static_cast<long long>(std::numeric_limits<Integer>::max())));
    }
    return value;
  }
  [[noreturn]] static void out_of_range(const std::string& where, const std::string& text, const std::string& allowed) {
    user_error("%s %s is out of range; it must be %s", where.c_str(), text.c_str(), allowed.c_str());
  }

  std::string usage_;
  std::vector<Option<Values>> rows_;
};
