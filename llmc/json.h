// json.h -- numbers and texts as JSON.
#pragma once

#include <cmath>
#include <string>

#include "llmc/check.h"

/// A number that reads back to the same bits; JSON has no nan and no infinity, they become null.
inline std::string json_number(double value) { return std::isfinite(value) ? format_text("%.17g", value) : "null"; }

/// The text in quotes, with what JSON does not take as it is written as an escape.
inline std::string json_text(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    const bool special = c == '"' || c == '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      result += format_text("\\u%04x", c);
    } else {
      result += special ? std::string("\\") + c : std::string(1, c);
    }
  }
  return result + "\"";
}
