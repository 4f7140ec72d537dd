// Attention of prompts on the matrix unit: both products of 64 (token, head) pairs at a time with 64 positions.
//
//   keys, once a step:    [16 positions][32 dims] units, as activations are          scores[position][64 pairs] = keys · queries
//   values, once a step:  transposed, [16 dims][32 positions] units                  out[dim][64 pairs] += values · weights
//
// Queries and weights are the side that is spread into pairs (amx.h). Everything that is multiplied is rounded to bfloat16, sums and
// softmax (taken on the fly, lane by lane) are float32: lossy. Three terms of each, as products with weights have them, were no
// quicker than vectors in float32 (measured), so exact attention is that of attention.h.
#pragma once

#include <vector>

#include "amx_products.h"
#include "attention.h"

#if HP_AMX

namespace hp {
namespace {

constexpr int64_t PAIRS = TOGETHER * TILE;  // lanes of an item
constexpr int STEP_POSITIONS = 64;          // between two updates of the running softmax

// Keys and values of one (sequence, KV head) as units, for positions [0, padded).
struct SplitCache {
    uint16_t* keys;    // [16 positions][head_dim / 32] units
    uint16_t* values;  // [head_dim / 16][padded / 32] units
    int64_t padded;          // a multiple of STEP_POSITIONS; beyond what is written, zeros

    static int64_t units(int64_t padded, int64_t head_dim) { return padded / 16 * (head_dim / BLOCK); }  // of either
};

HP_INLINE void store_rounded(uint16_t* to, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), upper_halves(rounded(v))); }

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
template <class E>
inline void split_positions(const E* keys, const E* values, int64_t step, int64_t first, int64_t count, int64_t head_dim, int64_t padded,
                            uint16_t* key_units, uint16_t* value_units) {
    for (int64_t d = 0; d < head_dim; d += 16)
        for (int64_t half = 0; half < BLOCK; half += 16) {
            __m512 rows[16];
            for (int64_t p = 0; p < 16; p++) {
                const int64_t at = first + half + p, unit = at / 16 * (head_dim / BLOCK) + d / BLOCK;
                const bool real = half + p < count;
                const __m512 key = real ? vload_kv(keys + at * step + d) : _mm512_setzero_ps();
                store_rounded(key_units + unit * UNIT + p * BLOCK + d % BLOCK, key);
                rows[p] = real ? vload_kv(values + at * step + d) : _mm512_setzero_ps();
            }
            transpose(rows);
            uint16_t* unit = value_units + (d / 16 * (padded / BLOCK) + first / BLOCK) * UNIT + half;
            for (int i = 0; i < 16; i++) store_rounded(unit + i * BLOCK, rows[i]);
        }
}

// A thread's scratch for items.
struct ItemScratch {
    std::vector<uint16_t, AlignedAllocator<uint16_t>> queries, weights;
    std::vector<float, AlignedAllocator<float>> scores, result;
    void reserve(int64_t head_dim) {
        queries.resize(static_cast<size_t>(TOGETHER * head_dim / BLOCK * UNIT));
        weights.resize(static_cast<size_t>(TOGETHER * STEP_POSITIONS / BLOCK * UNIT));
        scores.resize(static_cast<size_t>(STEP_POSITIONS * PAIRS));
        result.resize(static_cast<size_t>(head_dim * PAIRS));
    }
};

// Softmax of one tile of 16 lanes over the positions of a step: `scores` become weights, as pairs in `to`. Returns by how much
// earlier sums shrink.
inline __m512 soften_lanes(float* scores, __m512& maximum, __m512& total, uint16_t* to) {
    __m512 highest = maximum;
    for (int p = 0; p < STEP_POSITIONS; p++) highest = _mm512_max_ps(highest, _mm512_load_ps(scores + p * PAIRS));
    const __m512 shrink = vexp(_mm512_sub_ps(maximum, highest));
    __m512 sum = _mm512_mul_ps(total, shrink);
    for (int p = 0; p < STEP_POSITIONS; p += 2) {
        const __m512 even = vexp(_mm512_sub_ps(_mm512_load_ps(scores + p * PAIRS), highest));
        const __m512 odd = vexp(_mm512_sub_ps(_mm512_load_ps(scores + (p + 1) * PAIRS), highest));
        sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        store_pair(to + p / BLOCK * UNIT + p % BLOCK / 2 * 32, rounded(even), rounded(odd));
    }
    maximum = highest;
    total = sum;
    return shrink;
}

// Up to 64 pairs of one KV head, pair i seeing positions 0..last[i]. Each query is head_dim floats.
inline void attend_pairs(int pairs, const int64_t* last, int head_dim, const SplitCache& cache, ItemScratch& own, const float* const* rows,
                         const Target* targets) {
    const int blocks = head_dim / BLOCK;
    Pointers queries, weights;
    int64_t visible = 0;
    for (int n = 0; n < TOGETHER; n++) {
        for (int b = 0; b < blocks; b++) {
            uint16_t* unit = own.queries.data() + (n * blocks + b) * UNIT;
            queries.at[n][b] = unit;
            for (int d = 0; d < BLOCK; d += 16) {
                __m512 dims[16];
                for (int i = 0; i < TILE; i++) dims[i] = _mm512_loadu_ps(rows[std::min(n * TILE + i, pairs - 1)] + b * BLOCK + d);
                transpose(dims);
                for (int i = 0; i < 16; i += 2) store_pair(unit + (d + i) * 16, rounded(dims[i]), rounded(dims[i + 1]));
            }
        }
        for (int b = 0; b < STEP_POSITIONS / BLOCK; b++) weights.at[n][b] = own.weights.data() + (n * STEP_POSITIONS / BLOCK + b) * UNIT;
    }
    for (int i = 0; i < pairs; i++) visible = std::max(visible, last[i] + 1);
    std::fill(own.result.begin(), own.result.end(), 0.0f);
    __m512 maxima[TOGETHER], totals[TOGETHER];
    for (int n = 0; n < TOGETHER; n++) maxima[n] = _mm512_set1_ps(-1e30f), totals[n] = _mm512_setzero_ps();
    float* scores = own.scores.data();
    for (int64_t start = 0; start < visible; start += STEP_POSITIONS) {
        std::fill(scores, scores + STEP_POSITIONS * PAIRS, 0.0f);
        for (int tile = 0; tile < STEP_POSITIONS / 16; tile++)
            multiply_values_1x4<1, 1>(queries, blocks, cache.keys + (start / 16 + tile) * blocks * UNIT, scores + tile * 16 * PAIRS);
        for (int i = 0; i < pairs; i++)  // what a pair must not see
            for (int64_t p = std::max<int64_t>(last[i] + 1 - start, 0); p < STEP_POSITIONS; p++) scores[p * PAIRS + i] = -1e30f;
        __m512 shrink[TOGETHER];
        for (int n = 0; n < TOGETHER; n++)
            shrink[n] = soften_lanes(scores + n * TILE, maxima[n], totals[n], own.weights.data() + n * STEP_POSITIONS / BLOCK * UNIT);
        for (int64_t d = 0; d < head_dim; d++)
            for (int n = 0; n < TOGETHER; n++) {
                float* at = own.result.data() + d * PAIRS + n * TILE;
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), shrink[n]));
            }
        for (int64_t d = 0; d < head_dim; d += 16)
            multiply_values_1x4<1, 1>(weights, STEP_POSITIONS / BLOCK, cache.values + (d / 16 * (cache.padded / BLOCK) + start / BLOCK) * UNIT,
                                  own.result.data() + d * PAIRS);
    }
    for (int n = 0; n < TOGETHER; n++)
        for (int d = 0; d < head_dim; d += 16) {
            __m512 lanes[16];
            for (int i = 0; i < 16; i++) lanes[i] = _mm512_div_ps(_mm512_load_ps(own.result.data() + (d + i) * PAIRS + n * TILE), totals[n]);
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
