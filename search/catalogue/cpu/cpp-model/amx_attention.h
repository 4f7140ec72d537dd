// Attention of prompts on the matrix unit: both products of 64 (token, head) pairs at a time with 64 positions.
//
//   keys, once a layer:    [16 positions][32 dims] units, as activations are         scores[position][64 pairs] = keys · queries
//   values, once a layer:  transposed, [16 dims][32 positions] units                 out[dim][64 pairs] += values · weights
//
// Queries and weights are the side that is spread into pairs (amx.h). KEPT 3: keys, values, queries and weights are the sums of three
// bfloat16, exactly, and the six largest products are kept: what is dropped is below 2^-23 of the largest. KEPT 1: each is rounded to
// one, which is lossy. Sums and softmax (taken on the fly, lane by lane) are float32.
#pragma once

#include <vector>

#include "amx_products.h"
#include "attention.h"

#if HP_AMX

namespace hp {
namespace {

constexpr int64_t PAIRS = TOGETHER * TILE;  // lanes of an item
constexpr int STEP_POSITIONS = 64;          // between two updates of the running softmax
constexpr int STEP_BLOCKS = STEP_POSITIONS / BLOCK;
constexpr int MOST_DIM_BLOCKS = 8;          // head_dim 256
constexpr int LEAST_PAIRS = 48;             // of a sequence and KV head; fewer do not pay for splitting its cache

// Keys and values of one (sequence, KV head) as units of `kept` terms, for positions [0, padded).
struct SplitCache {
    uint16_t* keys;    // [16 positions][head_dim / 32] units
    uint16_t* values;  // [head_dim / 16][padded / 32] units
    int64_t padded;    // a multiple of STEP_POSITIONS; beyond what is written, zeros

    static int64_t units(int64_t padded, int64_t head_dim, int kept) { return padded / 16 * (head_dim / BLOCK) * kept; }  // of either
};

// 16 rows of 16 to 16 columns of 16, in place.
HP_INLINE void transpose(__m512* x) {
    __m512 two[16], four[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        two[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const auto pair = [&](int a) { return _mm512_castps_pd(two[i + a]); };
        four[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(0), pair(2)));
        four[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(0), pair(2)));
        four[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(1), pair(3)));
        four[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(1), pair(3)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // four[i], four[i + 4], ...: quarters of columns i, i + 4, i + 8, i + 12
        const __m512 a = _mm512_shuffle_f32x4(four[i], four[i + 4], 0x88), b = _mm512_shuffle_f32x4(four[i + 8], four[i + 12], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(four[i], four[i + 4], 0xdd), d = _mm512_shuffle_f32x4(four[i + 8], four[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

// Units of 32 positions from `first` on; `count` of them exist.
template <int KEPT, class E>
inline void split_positions(const E* keys, const E* values, int64_t step, int64_t first, int64_t count, int64_t head_dim, int64_t padded,
                            uint16_t* key_units, uint16_t* value_units) {
    const auto dims = [&](const E* of, int64_t p, int64_t d) { return p < count ? vload_kv(of + (first + p) * step + d) : _mm512_setzero_ps(); };
    for (int64_t p = 0; p < BLOCK; p++)
        for (int64_t d = 0; d < head_dim; d += BLOCK) {
            const int64_t unit = (first + p) / 16 * (head_dim / BLOCK) + d / BLOCK;
            split_row<KEPT>(dims(keys, p, d), dims(keys, p, d + 16), key_units + unit * KEPT * UNIT + p % 16 * BLOCK);
        }
    for (int64_t d = 0; d < head_dim; d += 16) {
        __m512 early[16], late[16];
        for (int p = 0; p < 16; p++) early[p] = dims(values, p, d), late[p] = dims(values, p + 16, d);
        transpose(early);
        transpose(late);
        uint16_t* unit = value_units + (d / 16 * (padded / BLOCK) + first / BLOCK) * KEPT * UNIT;
        for (int i = 0; i < 16; i++) split_row<KEPT>(early[i], late[i], unit + i * BLOCK);
    }
}

// A thread's scratch for items.
struct ItemScratch {
    Aligned<uint16_t> queries, weights;
    Floats scores, result;
    void reserve(int64_t head_dim) {
        queries.resize(static_cast<size_t>(TOGETHER * head_dim / BLOCK * TERMS * UNIT));
        weights.resize(static_cast<size_t>(TOGETHER * STEP_BLOCKS * TERMS * UNIT));
        scores.resize(static_cast<size_t>(STEP_POSITIONS * PAIRS));
        result.resize(static_cast<size_t>(head_dim * PAIRS));
    }
};

// e^x for x <= 0, as vexp but in a third fewer operations: 2^(n + f), f within a half, by a polynomial of degree 6 (least squares in
// relative error, 3e-9 before rounding); n is taken from a sum whose unit is one, and added to the exponent.
HP_INLINE __m512 exp_negative(__m512 x) {
    const __m512 shift = _mm512_set1_ps(12582912.0f), log2e = _mm512_set1_ps(1.44269504f);
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    const __m512 shifted = _mm512_fmadd_ps(x, log2e, shift);
    __m512 f = _mm512_fmsub_ps(x, log2e, _mm512_sub_ps(shifted, shift));
    f = _mm512_fmadd_ps(x, _mm512_set1_ps(1.925963e-8f), f);
    __m512 p = _mm512_set1_ps(1.53705652e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.34001113e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61837545e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55032827e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226477e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147182e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// Softmax of 16 lanes over `count` positions, a multiple of 32: `scores` become weights, as pairs in `to`. Returns by how much earlier
// sums shrink. Weights are not negative: their terms are cut, not rounded, and those of the other side make up for it.
template <int KEPT>
HP_INLINE __m512 soften_lanes(const float* scores, int count, __m512& maximum, __m512& total, uint16_t* to) {
    __m512 high[4] = {maximum, maximum, maximum, maximum};
    for (int p = 0; p < count; p += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) high[i] = _mm512_max_ps(high[i], _mm512_load_ps(scores + (p + i) * PAIRS));
    const __m512 highest = _mm512_max_ps(_mm512_max_ps(high[0], high[1]), _mm512_max_ps(high[2], high[3]));
    const __m512 shrink = exp_negative(_mm512_sub_ps(maximum, highest));
    __m512 evens = _mm512_mul_ps(total, shrink), odds = _mm512_setzero_ps();
    for (int p = 0; p < count; p += 2) {
        __m512 even = exp_negative(_mm512_sub_ps(_mm512_load_ps(scores + p * PAIRS), highest));
        __m512 odd = exp_negative(_mm512_sub_ps(_mm512_load_ps(scores + (p + 1) * PAIRS), highest));
        evens = _mm512_add_ps(evens, even);
        odds = _mm512_add_ps(odds, odd);
        uint16_t* at = to + p / BLOCK * KEPT * UNIT + p % BLOCK / 2 * 32;
        if constexpr (KEPT == 1) {
            store_pair(at, rounded(even), rounded(odd));
            continue;
        }
#pragma GCC unroll 3
        for (int term = 0; term < KEPT; term++) {
            store_pair(at + term * UNIT, even, odd);
            even = _mm512_sub_ps(even, truncated(even));
            odd = _mm512_sub_ps(odd, truncated(odd));
        }
    }
    maximum = highest;
    total = _mm512_add_ps(evens, odds);
    return shrink;
}

// Queries of one tile of 16 pairs as units of pairs: [block][term].
template <int KEPT>
inline void spread_queries(const float* const* rows, int pairs, int blocks, uint16_t* to) {
    for (int d = 0; d < blocks * BLOCK; d += 16) {
        __m512 dims[16];
        for (int i = 0; i < TILE; i++) dims[i] = _mm512_loadu_ps(rows[std::min(i, pairs - 1)] + d);
        transpose(dims);
        uint16_t* unit = to + d / BLOCK * KEPT * UNIT + d % BLOCK * 16;
        for (int term = 0; term < KEPT; term++)
            for (int i = 0; i < 16; i += 2) {
                const __m512 even = rounded(dims[i]), odd = rounded(dims[i + 1]);
                store_pair(unit + term * UNIT + i * 16, even, odd);
                dims[i] = _mm512_sub_ps(dims[i], even);
                dims[i + 1] = _mm512_sub_ps(dims[i + 1], odd);
            }
    }
}

// Up to 64 pairs of one KV head, pair i seeing positions 0..last[i]. Each query is head_dim floats.
template <int KEPT>
inline void attend_pairs(int pairs, const int64_t* last, int head_dim, const SplitCache& cache, ItemScratch& own, const float* const* rows,
                         const Target* targets) {
    const int blocks = head_dim / BLOCK, tiles = (pairs + 2 * TILE - 1) / (2 * TILE) * 2;  // of pairs, two by two
    const uint16_t *queries[TOGETHER][MOST_DIM_BLOCKS], *weights[TOGETHER][STEP_BLOCKS];
    for (int n = 0; n < tiles; n++) {
        uint16_t* to = own.queries.data() + n * blocks * KEPT * UNIT;
        const int first = std::min(n * TILE, pairs - 1);
        spread_queries<KEPT>(rows + first, std::min(TILE, pairs - first), blocks, to);
        for (int b = 0; b < blocks; b++) queries[n][b] = to + b * KEPT * UNIT;
        for (int b = 0; b < STEP_BLOCKS; b++) weights[n][b] = own.weights.data() + (n * STEP_BLOCKS + b) * KEPT * UNIT;
    }
    const int64_t visible = *std::max_element(last, last + pairs) + 1, sure = *std::min_element(last, last + pairs) + 1;
    std::fill(own.result.begin(), own.result.end(), 0.0f);
    __m512 maxima[TOGETHER], totals[TOGETHER];
    for (int n = 0; n < TOGETHER; n++) maxima[n] = _mm512_set1_ps(-1e30f), totals[n] = _mm512_setzero_ps();
    float *scores = own.scores.data(), *result = own.result.data();
    for (int64_t start = 0; start < visible; start += STEP_POSITIONS) {
        const int count = static_cast<int>(std::min<int64_t>(STEP_POSITIONS, (visible - start + BLOCK - 1) / BLOCK * BLOCK));
        for (int p = 0; p < count; p += 2 * TILE)
            for (int n = 0; n < tiles; n += 2) {
                const uint16_t* key = cache.keys + (start + p) / 16 * blocks * KEPT * UNIT;
                const uint16_t* keys[2] = {key, key + blocks * KEPT * UNIT};
                float* sums[2] = {scores + p * PAIRS + n * TILE, scores + (p + TILE) * PAIRS + n * TILE};
                multiply_values_2x2<KEPT, KEPT, false>(queries[n], queries[n + 1], keys, blocks, sums);
            }
        if (start + count > sure)
            for (int i = 0; i < pairs; i++)  // what a pair must not see
                for (int64_t p = std::max<int64_t>(last[i] + 1 - start, 0); p < count; p++) scores[p * PAIRS + i] = -1e30f;
        for (int n = 0; n < tiles; n++) {
            const __m512 shrink = soften_lanes<KEPT>(scores + n * TILE, count, maxima[n], totals[n], own.weights.data() + n * STEP_BLOCKS * KEPT * UNIT);
            if (_mm512_cmp_ps_mask(shrink, _mm512_set1_ps(1.0f), _CMP_NEQ_OQ) == 0) continue;
            for (int64_t d = 0; d < head_dim; d++) {
                float* at = result + d * PAIRS + n * TILE;
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), shrink));
            }
        }
        const int64_t row = cache.padded / BLOCK * KEPT * UNIT;  // of values: 16 dims
        for (int64_t d = 0; d < head_dim; d += 2 * TILE)
            for (int n = 0; n < tiles; n += 2) {
                const uint16_t* value = cache.values + d / 16 * row + start / BLOCK * KEPT * UNIT;
                const uint16_t* values[2] = {value, value + row};
                float* sums[2] = {result + d * PAIRS + n * TILE, result + (d + TILE) * PAIRS + n * TILE};
                multiply_values_2x2<KEPT, KEPT, true>(weights[n], weights[n + 1], values, count / BLOCK, sums);
            }
    }
    for (int n = 0; n * TILE < pairs; n++)
        for (int d = 0; d < head_dim; d += 16) {
            __m512 lanes[16];
            for (int i = 0; i < 16; i++) lanes[i] = _mm512_div_ps(_mm512_load_ps(result + (d + i) * PAIRS + n * TILE), totals[n]);
            transpose(lanes);
            for (int i = 0; i < std::min(TILE, pairs - n * TILE); i++) {
                const Target& to = targets[n * TILE + i];
                if (to.step == 1) {
                    _mm512_storeu_ps(to.data + d, lanes[i]);
                    continue;
                }
                alignas(64) float values[16];
                _mm512_store_ps(values, lanes[i]);
                for (int k = 0; k < 16; k++) to.data[(d + k) * to.step] = values[k];
            }
        }
}

}  // namespace
}  // namespace hp

#endif
