// check.h -- the three kinds of error and how each one ends the program.
//
//   user error         a request that cannot be met (option, file, shape)   `error: ...` in one line   exit code 2
//   environment error  the machine said no (CUDA, cuBLAS, MPI, NCCL, disk)   `error: ...` in one line   exit code 1
//   programmer error   a broken promise inside the code                      assert, on in every build
//
// Errors are thrown as `Error` and caught once, in main. An error that every rank throws at the same point (together.h)
// ends all ranks in good order and is printed once; any other ends the job at once, since the other ranks wait for this
// one. Messages name the value and the remedy: "--micro-batch 6 does not divide --batch 64; use 8 or 4".
#pragma once

#include <cassert>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#ifdef NDEBUG
#error "asserts stay on in every build: do not define NDEBUG"
#endif

enum class ErrorKind { kUser = 2, kEnvironment = 1 };

/// What main prints and returns: `error: what()`, exit code `exit_code()`.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, bool on_all_ranks = false)
      : std::runtime_error(message), kind_(kind), on_all_ranks_(on_all_ranks) {}
  ErrorKind kind() const { return kind_; }
  int exit_code() const { return static_cast<int>(kind_); }
  bool on_all_ranks() const { return on_all_ranks_; }

 private:
  ErrorKind kind_;
  bool on_all_ranks_;
};

/// printf into a string.
__attribute__((format(printf, 1, 0))) inline std::string format_arguments(const char* format, va_list arguments) {
  va_list copy;
  va_copy(copy, arguments);
  const int length = vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  std::string text(static_cast<size_t>(length), '\0');
  vsnprintf(&text[0], text.size() + 1, format, arguments);
  return text;
}

__attribute__((format(printf, 1, 2))) inline std::string format_text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  return text;
}

/// Throws a user error (exit code 2).
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void user_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  throw Error(ErrorKind::kUser, text);
}

/// Throws an environment error (exit code 1).
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void environment_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  throw Error(ErrorKind::kEnvironment, text);
}

/// The same, where every rank of the job is known to throw it at this point.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void environment_error_on_all_ranks(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  throw Error(ErrorKind::kEnvironment, text, true);
}

/// Library calls: on failure an environment error with the call's text, its place and the library's own words.
/// `describe(status)` gives those words; `success` is the library's value for "no error".
#define LIBRARY_CHECK(expression, success, describe)                                                  \
  do {                                                                                                \
    const auto status_ = (expression);                                                                \
    if (status_ != (success)) {                                                                       \
      environment_error("%s failed: %s (%s:%d)", #expression, describe(status_), __FILE__, __LINE__); \
    }                                                                                                 \
  } while (0)

#define CUDA_CHECK(expression) LIBRARY_CHECK(expression, cudaSuccess, cudaGetErrorString)
#define CUBLAS_CHECK(expression) LIBRARY_CHECK(expression, CUBLAS_STATUS_SUCCESS, cublasLtGetStatusString)
#define NCCL_CHECK(expression) LIBRARY_CHECK(expression, ncclSuccess, ncclGetErrorString)
