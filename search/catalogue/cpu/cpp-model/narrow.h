// Products with activations rounded to 8 bits, one scale for each block of 32: integer arithmetic, lossy.
//
// A lane holds four 8-bit codes of one weight row; they meet four activations that are broadcast. With VNNI that is one
// instruction for 4 · LANES products, with AVX2 three. Codes of Q4 are 0..15; those of Q8 are signed.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace hp {

#if defined(HP_AVX512) && defined(__AVX512VNNI__)
constexpr int BIAS = 128;  // signed codes are made unsigned by this; what that adds is taken off again
HP_INLINE I izero() { return _mm512_setzero_si512(); }
HP_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
HP_INLINE I iset(int32_t x) { return _mm512_set1_epi32(x); }
HP_INLINE V to_floats(I x) { return _mm512_cvtepi32_ps(x); }
HP_INLINE I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
HP_INLINE I high_nibbles(I v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
HP_INLINE I dot_unsigned(I sum, I codes, I x) { return _mm512_dpbusd_epi32(sum, codes, x); }
HP_INLINE I dot_signed(I sum, I codes, I x) { return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)), x); }
#elif defined(HP_AVX2)
constexpr int BIAS = 0;
HP_INLINE I izero() { return _mm256_setzero_si256(); }
HP_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
HP_INLINE I iset(int32_t x) { return _mm256_set1_epi32(x); }
HP_INLINE V to_floats(I x) { return _mm256_cvtepi32_ps(x); }
HP_INLINE I low_nibbles(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
HP_INLINE I high_nibbles(I v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
HP_INLINE I dot_unsigned(I sum, I codes, I x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}
HP_INLINE I dot_signed(I sum, I codes, I x) { return dot_unsigned(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes)); }
#else
constexpr int BIAS = 0;
#if defined(HP_AVX512)
HP_INLINE I izero() { return _mm512_setzero_si512(); }
HP_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
HP_INLINE I iset(int32_t x) { return _mm512_set1_epi32(x); }
HP_INLINE V to_floats(I x) { return _mm512_cvtepi32_ps(x); }
HP_INLINE I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
HP_INLINE I high_nibbles(I v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
HP_INLINE I dot_unsigned(I sum, I codes, I x) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
}
HP_INLINE I dot_signed(I sum, I codes, I x) {
    const __mmask64 negative = _mm512_movepi8_mask(codes);
    return dot_unsigned(sum, _mm512_abs_epi8(codes), _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x));
}
#else
HP_INLINE I izero() { return I{}; }
HP_INLINE I iadd(I a, I b) { return a + b; }
HP_INLINE I iset(int32_t x) { return I{} + x; }
HP_INLINE V to_floats(I x) { return __builtin_convertvector(x, V); }
HP_INLINE I low_nibbles(I v) { return v & 0x0f0f0f0f; }
HP_INLINE I high_nibbles(I v) { return (v >> 4) & 0x0f0f0f0f; }
HP_INLINE I dot_signed(I sum, I codes, I x) {
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((codes << shift) >> 24) * ((x << shift) >> 24);
    return sum;
}
HP_INLINE I dot_unsigned(I sum, I codes, I x) { return dot_signed(sum, codes, x); }  // codes are below 128
#endif
#endif

// Rows of activations as bytes: [block][row][32] with the columns in the order in which the format's codes lie.
struct Narrow {
    int8_t* bytes;
    float* scales;  // [block][row]
    float* sums;    // [block][row], of the rounded values, scaled
    int32_t* bias;  // [block][row], of the bytes, times -BIAS
};

// x is [column][row]. Q4 lanes hold nibbles of columns 0,4,1,5 (low halves of the bytes) and 2,6,3,7 (high halves).
inline void narrow_rows(const float* x, int64_t columns, int rows, bool nibbles, const Narrow& to) {
    static const int order[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int64_t b = 0; b < columns / BLOCK; b++)
        for (int m = 0; m < rows; m++) {
            const float* from = x + b * BLOCK * rows + m;
            float highest = 0;
            for (int k = 0; k < BLOCK; k++) highest = std::max(highest, std::fabs(from[k * rows]));
            const float scale = highest / 127, inverse = highest > 0 ? 127 / highest : 0;
            int8_t* bytes = to.bytes + (b * rows + m) * BLOCK;
            int32_t sum = 0;
            for (int k = 0; k < BLOCK; k++) {
                const float value = from[(nibbles ? k / 8 * 8 + order[k % 8] : k) * rows] * inverse;
                const int32_t rounded = static_cast<int32_t>(value + std::copysign(0.5f, value));
                bytes[k] = static_cast<int8_t>(rounded);
                sum += rounded;
            }
            to.scales[b * rows + m] = scale;
            to.sums[b * rows + m] = scale * static_cast<float>(sum);
            to.bias[b * rows + m] = -BIAS * sum;
        }
}

HP_INLINE int32_t four_bytes(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

template <class D>
HP_INLINE V plain_scale(const uint8_t* tile, int64_t b, int64_t blocks, int sub) {
    if constexpr (D::HAS_MINIMUM) return D::scale(tile, b, blocks, sub);
    else return D::plain_scale(tile, b, blocks, sub);
}

// out[row][16] = tile · x, for Q4 (NIBBLES) and Q8.
template <bool NIBBLES, int M>
inline void few_rows_narrow(const uint8_t* tile, int64_t blocks, const Narrow& x, float* out) {
    using D = std::conditional_t<NIBBLES, DecodeQ4, DecodeQ8>;
    constexpr int S = M <= 2 ? SUBS : 1;
    for (int first = 0; first < SUBS; first += S) {
        V total[S][M];
        for (int s = 0; s < S; s++)
            for (int m = 0; m < M; m++) total[s][m] = vzero();
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t* p = tile + b * D::BYTES;
            if (first == 0) prefetch_block<D>(p);
#pragma GCC unroll 2
            for (int s = 0; s < S; s++) {
                I sum[M][2];
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) sum[m][0] = NIBBLES ? izero() : iset(x.bias[b * M + m]), sum[m][1] = izero();
#pragma GCC unroll 8
                for (int group = 0; group < (NIBBLES ? 4 : 8); group++) {
                    const I v = iload(p + group * 64 + (first + s) * LANES * 4);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        const int8_t* xb = x.bytes + (b * M + m) * BLOCK;
                        if constexpr (NIBBLES) {
                            sum[m][0] = dot_unsigned(sum[m][0], low_nibbles(v), iset(four_bytes(xb + group * 8)));
                            sum[m][1] = dot_unsigned(sum[m][1], high_nibbles(v), iset(four_bytes(xb + group * 8 + 4)));
                        } else {
                            sum[m][group % 2] = dot_signed(sum[m][group % 2], v, iset(four_bytes(xb + group * 4)));
                        }
                    }
                }
                const V scale = plain_scale<D>(tile, b, blocks, first + s), minimum = D::minimum(tile, b, blocks, first + s);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    total[s][m] = vfma(scale * vset(x.scales[b * M + m]), to_floats(iadd(sum[m][0], sum[m][1])), total[s][m]);
                    if constexpr (D::HAS_MINIMUM) total[s][m] = vfma(minimum, vset(x.sums[b * M + m]), total[s][m]);
                }
            }
        }
        for (int s = 0; s < S; s++)
            for (int m = 0; m < M; m++) vstore(out + m * TILE + (first + s) * LANES, total[s][m]);
    }
}

using FewRowsNarrow = void (*)(const uint8_t*, int64_t, const Narrow&, float*);

template <bool NIBBLES, int... M>
constexpr FewRowsNarrow few_rows_narrow_of(int rows, std::integer_sequence<int, M...>) {
    constexpr FewRowsNarrow table[] = {few_rows_narrow<NIBBLES, M + 1>...};
    return table[rows - 1];
}

inline FewRowsNarrow few_rows_narrow_for(int64_t format, int rows) {
    const auto all = std::make_integer_sequence<int, FEW>{};
    return format == Q4 ? few_rows_narrow_of<true>(rows, all) : few_rows_narrow_of<false>(rows, all);
}

}  // namespace hp
