// Products in integers: codes of Q4 and Q8 with activations as 8-bit digits, a few rows at a time.
//
// Four digits: a block of 32 activations is scaled by a power of two to integers of 31 bits, each the sum of four signed digits
// times 1, 256, 65536, 2^24. Sums of products are exact; float32 comes in when they are scaled. An activation loses what lies
// 2^-30 below the block's largest, less than float32 loses when it adds them up: nothing is narrower, and most is wider.
// One digit (`narrow`): activations are rounded to 8 bits, with the largest as scale. That is lossy.
//
// A lane holds four codes of one weight row; they meet four digits that are broadcast. With VNNI that is one instruction for
// 4 · LANES products, where decoding codes to floats takes two and the product a third for LANES.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace hp {
namespace {

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
HP_INLINE I izero() { return _mm256_setzero_si256(); }
HP_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
HP_INLINE I iset(int32_t x) { return _mm256_set1_epi32(x); }
HP_INLINE V to_floats(I x) { return _mm256_cvtepi32_ps(x); }
HP_INLINE I low_nibbles(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
HP_INLINE I high_nibbles(I v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
#if defined(__AVXVNNI__)
constexpr int BIAS = 128;
HP_INLINE I dot_unsigned(I sum, I codes, I x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
HP_INLINE I dot_signed(I sum, I codes, I x) { return dot_unsigned(sum, _mm256_xor_si256(codes, _mm256_set1_epi8(-128)), x); }
#else
constexpr int BIAS = 0;
HP_INLINE I dot_unsigned(I sum, I codes, I x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
// Activations lie within -127..127, so that their sign can change.
HP_INLINE I dot_signed(I sum, I codes, I x) { return dot_unsigned(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes)); }
#endif
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

// Rows of activations as digits, columns in the order in which the format's codes lie in a lane.
struct Digits {
    int8_t* digits;  // [block][row][digit][32]
    float* scales;   // [block][row]
    float* sums;     // [block][row], of the values that the digits stand for; given for four digits, made for one
    int32_t* bias;   // [block][row][digit], -BIAS times the sum of the digits
};

constexpr int EXACT_DIGITS = 4;

// Column of a group of eight whose code is at each place: nibbles of columns 0,4,1,5 are the low halves of a lane's bytes.
constexpr int NIBBLE_ORDER[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// planes[digit][32] of 32 whole numbers; digits are the bytes of each.
template <int DIGITS, bool NIBBLES>
HP_INLINE void store_planes(const int32_t* whole, int8_t* planes) {
#if defined(HP_AVX512) && defined(__AVX512VBMI__)
    const __m512i low = _mm512_load_si512(whole), high = _mm512_load_si512(whole + 16);
    alignas(64) static const auto places = [] {
        struct { uint8_t at[DIGITS * BLOCK < 64 ? 64 : DIGITS * BLOCK]; } made{};
        for (int d = 0; d < DIGITS; d++)
            for (int k = 0; k < BLOCK; k++)
                made.at[d * BLOCK + k] = static_cast<uint8_t>((NIBBLES ? k / 8 * 8 + NIBBLE_ORDER[k % 8] : k) * 4 + d);
        return made;
    }();
    for (int at = 0; at < DIGITS * BLOCK; at += 64) {
        const __m512i bytes = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(places.at + at), high);
        if constexpr (DIGITS == 1) _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes), _mm512_castsi512_si256(bytes));
        else _mm512_storeu_si512(planes + at, bytes);
    }
#else
    for (int k = 0; k < BLOCK; k += 8)
        for (int i = 0; i < 8; i++)
            for (int d = 0; d < DIGITS; d++)
                planes[d * BLOCK + k + i] = static_cast<int8_t>(whole[k + (NIBBLES ? NIBBLE_ORDER[i] : i)] >> (8 * d));
#endif
}

// x is [column][row].
template <int DIGITS, bool NIBBLES>
inline void to_digits(const float* x, int64_t columns, int rows, const Digits& to) {
    for (int64_t b = 0; b < columns / BLOCK; b++)
        for (int m = 0; m < rows; m++) {
            const int64_t at = b * rows + m;
            const float* from = x + b * BLOCK * rows + m;
            alignas(64) float values[BLOCK];
            if (rows == 1) std::memcpy(values, from, sizeof values);
            else
                for (int k = 0; k < BLOCK; k++) values[k] = from[k * rows];
            V largest = vzero();
            for (int k = 0; k < BLOCK; k += LANES) largest = vmax(largest, vmax(vload(values + k), vzero() - vload(values + k)));
            const float highest = vhighest(largest);
            float scale, inverse;
            if constexpr (DIGITS == 1) {
                scale = highest / 127;
                inverse = highest > 0 ? 127 / highest : 0;
            } else {  // powers of two, by their exponents: the block's largest comes below 2^30
                uint32_t bits;
                std::memcpy(&bits, &highest, 4);
                const uint32_t exponent = std::min(std::max(bits >> 23, 60u), 250u);
                const uint32_t scale_bits = (exponent - 29) << 23, inverse_bits = (283 - exponent) << 23;
                std::memcpy(&scale, &scale_bits, 4);
                std::memcpy(&inverse, &inverse_bits, 4);
            }
            alignas(64) int32_t whole[BLOCK];
            for (int k = 0; k < BLOCK; k += LANES) vstore(values + k, round_nearest(vload(values + k) * vset(inverse)));
            // Adding half a digit at each place below the top and taking it off again makes each digit signed.
            for (int k = 0; k < BLOCK; k++)
                whole[k] = DIGITS == 1 ? static_cast<int32_t>(values[k]) : (static_cast<int32_t>(values[k]) + 0x808080) ^ 0x808080;
            int8_t* planes = to.digits + at * DIGITS * BLOCK;
            store_planes<DIGITS, NIBBLES>(whole, planes);
            to.scales[at] = scale;
            if (NIBBLES && DIGITS > 1) continue;  // their sums are those of the values
            for (int d = 0; d < DIGITS; d++) {
                int32_t total = 0;
                for (int k = 0; k < BLOCK; k++) total += planes[d * BLOCK + k];
                to.bias[at * DIGITS + d] = -BIAS * total;
                if (DIGITS == 1) to.sums[at] = scale * static_cast<float>(total);
            }
        }
}

HP_INLINE int32_t four_bytes(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// out[row][16] = tile · x, for Q4 (NIBBLES) and Q8.
template <int DIGITS, bool NIBBLES, int M>
inline void few_rows_digits(const uint8_t* tile, int64_t blocks, const Digits& x, float* out) {
    using D = std::conditional_t<NIBBLES, DecodeQ4, DecodeQ8>;
    constexpr int S = M * DIGITS <= 4 ? SUBS : 1;
    constexpr int SPLIT = M * DIGITS <= 2 ? 2 : 1;  // sums of even and odd groups apart, where there are few to fill the pipeline
    for (int first = 0; first < SUBS; first += S) {
        V total[S][M];
        for (int s = 0; s < S; s++)
            for (int m = 0; m < M; m++) total[s][m] = vzero();
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t* p = tile + b * D::BYTES;
            if (first == 0) prefetch_block<D>(p);
#pragma GCC unroll 4
            for (int s = 0; s < S; s++) {
                I sum[M][DIGITS][SPLIT];
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                    for (int d = 0; d < DIGITS; d++) {
                        sum[m][d][SPLIT - 1] = izero();
                        sum[m][d][0] = NIBBLES ? izero() : iset(x.bias[(b * M + m) * DIGITS + d]);
                    }
#pragma GCC unroll 8
                for (int group = 0; group < (NIBBLES ? 4 : 8); group++) {
                    const I v = iload(p + group * 64 + (first + s) * LANES * 4);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                        for (int d = 0; d < DIGITS; d++) {
                            const int8_t* xb = x.digits + ((b * M + m) * DIGITS + d) * BLOCK;
                            I* to = sum[m][d];
                            if constexpr (NIBBLES) {
                                to[0] = dot_unsigned(to[0], low_nibbles(v), iset(four_bytes(xb + group * 8)));
                                to[SPLIT - 1] = dot_unsigned(to[SPLIT - 1], high_nibbles(v), iset(four_bytes(xb + group * 8 + 4)));
                            } else {
                                to[group % SPLIT] = dot_signed(to[group % SPLIT], v, iset(four_bytes(xb + group * 4)));
                            }
                        }
                }
                const V scale = plain_scale<D>(tile, b, blocks, first + s), minimum = D::minimum(tile, b, blocks, first + s);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    V whole = vzero();
#pragma GCC unroll 4
                    for (int d = DIGITS - 1; d >= 0; d--) {
                        const V digit = to_floats(SPLIT == 2 ? iadd(sum[m][d][0], sum[m][d][1]) : sum[m][d][0]);
                        whole = d == DIGITS - 1 ? digit : vfma(whole, vset(256.0f), digit);
                    }
                    total[s][m] = vfma(scale * vset(x.scales[b * M + m]), whole, total[s][m]);
                    if constexpr (D::HAS_MINIMUM) total[s][m] = vfma(minimum, vset(x.sums[b * M + m]), total[s][m]);
                }
            }
        }
        for (int s = 0; s < S; s++)
            for (int m = 0; m < M; m++) vstore(out + m * TILE + (first + s) * LANES, total[s][m]);
    }
}

// Up to so many rows integers are the quicker way to exact products; where codes go through three instructions, none.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int EXACT_ROWS = 4;
#else
constexpr int EXACT_ROWS = 0;
#endif

using FewRowsDigits = void (*)(const uint8_t*, int64_t, const Digits&, float*);

template <int DIGITS, bool NIBBLES, int... M>
constexpr FewRowsDigits few_rows_digits_of(int rows, std::integer_sequence<int, M...>) {
    constexpr FewRowsDigits table[] = {few_rows_digits<DIGITS, NIBBLES, M + 1>...};
    return table[rows - 1];
}

// The kernel for a format and a number of rows, and what makes its digits; null where floats are better or all there is.
struct DigitKernel {
    FewRowsDigits multiply = nullptr;
    void (*prepare)(const float*, int64_t, int, const Digits&) = nullptr;
};

inline DigitKernel digit_kernel(int64_t format, int rows, bool narrow) {
    if (format != Q4 && format != Q8) return {};
    if (narrow) {
        constexpr auto all = std::make_integer_sequence<int, FEW>{};
        return format == Q4 ? DigitKernel{few_rows_digits_of<1, true>(rows, all), to_digits<1, true>}
                            : DigitKernel{few_rows_digits_of<1, false>(rows, all), to_digits<1, false>};
    }
    if constexpr (EXACT_ROWS > 0) {
        constexpr auto all = std::make_integer_sequence<int, EXACT_ROWS>{};
        if (rows <= EXACT_ROWS)
            return format == Q4 ? DigitKernel{few_rows_digits_of<EXACT_DIGITS, true>(rows, all), to_digits<EXACT_DIGITS, true>}
                                : DigitKernel{few_rows_digits_of<EXACT_DIGITS, false>(rows, all), to_digits<EXACT_DIGITS, false>};
    }
    return {};
}

}  // namespace
}  // namespace hp
