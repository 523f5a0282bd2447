// reference.h -- attention and its gradient by the textbook: all probabilities of a query at once, on the host.
//
// Real = double is the truth that kernels are compared with. Real = float is the plain program in the precision of the
// kernels, which says what rounding error is to be expected; like them it keeps `out` as floatX and takes delta from
// that.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "llmc/device.h"

struct AttentionShape {
  int B, T, NH, HS;
  int C() const { return NH * HS; }
  size_t rows() const { return static_cast<size_t>(B) * NH * T; }
  size_t elements() const { return rows() * HS; }
  std::string name() const { return format_text("B %d T %d NH %d HS %d", B, T, NH, HS); }
};

template <class Real>
struct AttentionReference {
  std::vector<Real> out, lse, dqkv;

  AttentionReference(const AttentionShape& s, const std::vector<Real>& qkv, const std::vector<Real>& dout)
      : out(s.elements()), lse(s.rows()), dqkv(3 * s.elements(), Real{0}) {
    for (int b = 0; b < s.B; b++) {
      for (int h = 0; h < s.NH; h++) {
        for (int i = 0; i < s.T; i++) one_query(s, qkv, dout, b, h, i);
      }
    }
  }

 private:
  void one_query(const AttentionShape& s, const std::vector<Real>& qkv, const std::vector<Real>& dout, int b, int h,
                 int i) {
    const int C = s.C();
    const auto packed = [&](int t, int part) {
      return (static_cast<size_t>(b) * s.T + t) * 3 * C + part * C + h * s.HS;
    };
    const size_t plain = (static_cast<size_t>(b) * s.T + i) * C + h * s.HS;
    const Real scale = Real{1} / std::sqrt(static_cast<Real>(s.HS));
    const Real* q = &qkv[packed(i, 0)];
    std::vector<Real> p(i + 1);
    for (int j = 0; j <= i; j++) p[j] = scale * dot(q, &qkv[packed(j, 1)], s.HS);
    const Real largest = *std::max_element(p.begin(), p.end());
    Real sum = 0;
    for (Real& value : p) sum += value = std::exp(value - largest);
    for (Real& value : p) value /= sum;
    lse[(static_cast<size_t>(b) * s.NH + h) * s.T + i] = largest + std::log(sum);
    Real delta = 0;
    for (int d = 0; d < s.HS; d++) {
      Real total = 0;
      for (int j = 0; j <= i; j++) total += p[j] * qkv[packed(j, 2) + d];
      out[plain + d] = total;
      delta += dout[plain + d] * stored(total);
    }
    for (int j = 0; j <= i; j++) {
      const Real ds = scale * p[j] * (dot(&dout[plain], &qkv[packed(j, 2)], s.HS) - delta);
      for (int d = 0; d < s.HS; d++) {
        dqkv[packed(i, 0) + d] += ds * qkv[packed(j, 1) + d];
        dqkv[packed(j, 1) + d] += ds * q[d];
        dqkv[packed(j, 2) + d] += p[j] * dout[plain + d];
      }
    }
  }
  static Real dot(const Real* a, const Real* b, int n) {
    Real sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
  }
  static double stored(double value) { return value; }
  static float stored(float value) { return static_cast<float>(static_cast<floatX>(value)); }
};
