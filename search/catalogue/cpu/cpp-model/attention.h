// Attention over the KV slots, for one KV head and its G query heads at a time. Two forms:
//
//   a few tokens: each token's cached positions are one stretch; all stretches together are cut into equal shares, one a
//       thread, so that a share may begin and end within a stretch. A share leaves (maximum, sum, weighted values) for each
//       stretch that it touched, and whoever needs the result adds those up. Keys and values are read once.
//   many tokens: 16 (token, head) pairs are the lanes of a vector; keys and values are broadcast, so nothing is ever
//       summed across lanes, and the softmax is taken on the fly.
//
// Queries come scaled by 1/sqrt(head_dim). Keys and values are float32 or bfloat16; arithmetic is float32.
#pragma once

#include "kernels.h"

namespace hp {
namespace {

// To the nearest, ties to even, as torch rounds.
inline uint16_t rounded_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The KV slots of one side: [slot][kv head][position][head_dim] for each layer, strides in elements.
struct Cache {
    void* const* keys;
    void* const* values;
    int64_t slot_stride;
    int64_t head_stride;
    int64_t position_stride;
    int64_t is_bf16;

    int64_t at(int64_t slot, int64_t head, int64_t position) const {
        return slot * slot_stride + head * head_stride + position * position_stride;
    }
    void store(void* base, int64_t to, const float* row, int64_t count) const {
        if (!is_bf16) {
            std::memcpy(static_cast<float*>(base) + to, row, static_cast<size_t>(count) * sizeof(float));
            return;
        }
        for (int64_t i = 0; i < count; i++) static_cast<uint16_t*>(base)[to + i] = rounded_bf16(row[i]);
    }
};

HP_INLINE V vload_kv(const float* p) { return vload(p); }
HP_INLINE V vload_kv(const uint16_t* p) { return vbf16(p); }
HP_INLINE float load_kv(const float* p) { return *p; }
HP_INLINE float load_kv(const uint16_t* p) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Where the result of a (token, head) goes: value i to data[i · step].
struct Target {
    float* data;
    int64_t step;
};

constexpr int MOST_GROUPED = 64;  // query heads that share a KV head

// What a share knows of one head's attention: `values` are weighted by exp(score - maximum), `sum` is of those weights.
struct Partial {
    float* maximum;
    float* sum;
    float* values;  // [head_dim]
};

constexpr int POSITIONS_AHEAD = 32;

template <class T>
HP_INLINE void prefetch_row(const T* row, int dims) {
    for (int d = 0; d < dims; d += 64 / static_cast<int>(sizeof(T))) prefetch(row + d);
}

// scores[g][0..TILE) for 16 positions: products of each query head with each key, summed across lanes all at once.
template <class T, int HEADS>
inline void score_tile(const float* query, int head_dim, const T* keys, int64_t step, int64_t padded, float* scores) {
    for (int p = 0; p < TILE; p++) prefetch_row(keys + (p + POSITIONS_AHEAD) * step, head_dim);
#pragma GCC unroll 4
    for (int half = 0; half < SUBS; half++) {
        for (int g = 0; g < HEADS; g++) {
            V sums[LANES];
#pragma GCC unroll 16
            for (int p = 0; p < LANES; p++) sums[p] = vload(query + g * head_dim) * vload_kv(keys + (half * LANES + p) * step);
            for (int d = LANES; d < head_dim; d += LANES) {
                const V q = vload(query + g * head_dim + d);
#pragma GCC unroll 16
                for (int p = 0; p < LANES; p++) sums[p] = vfma(q, vload_kv(keys + (half * LANES + p) * step + d), sums[p]);
            }
            vstore(scores + g * padded + half * LANES, vsums(sums));
        }
    }
}

// values[g][d] = Σ_p scores[g][p] · value[p][d] for HEADS heads and DIMS vectors of dimensions: each value is read once.
template <class T, int HEADS, int DIMS>
inline void weigh_values(const float* scores, int64_t padded, const T* values, int64_t step, int64_t count, const Partial* partials, int dim) {
    V sums[HEADS][DIMS];
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) sums[g][d] = vzero();
    for (int64_t p = 0; p < count; p++) {
        prefetch_row(values + (p + POSITIONS_AHEAD) * step, DIMS * LANES);
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) {
            const V value = vload_kv(values + p * step + d * LANES);
#pragma GCC unroll 4
            for (int g = 0; g < HEADS; g++) sums[g][d] = vfma(vset(scores[g * padded + p]), value, sums[g][d]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) vstore(partials[g].values + dim + d * LANES, sums[g][d]);
}

// exp(score - maximum) in place, for one head; scores past `count` get no weight.
inline void soften(float* scores, int64_t count, int64_t padded, const Partial& partial) {
    for (int64_t p = count; p < padded; p++) scores[p] = -1e30f;
    V highest = vload(scores);
    for (int64_t p = LANES; p < padded; p += LANES) highest = vmax(highest, vload(scores + p));
    *partial.maximum = vhighest(highest);
    V sum = vzero();
    for (int64_t p = 0; p < padded; p += LANES) {
        const V weight = vexp(vload(scores + p) - vset(*partial.maximum));
        vstore(scores + p, weight);
        sum = sum + weight;
    }
    *partial.sum = vsum(sum);
}

template <class T, int HEADS>
inline void attend_heads(const float* query, int head_dim, const T* keys, const T* values, int64_t step, int64_t count, float* scores,
                         const Partial* partials) {
    const int64_t padded = (count + TILE - 1) / TILE * TILE;
    int64_t p = 0;
    for (; p + TILE <= count; p += TILE) score_tile<T, HEADS>(query, head_dim, keys + p * step, step, padded, scores + p);
    for (; p < count; p++)
        for (int g = 0; g < HEADS; g++) {
            V sum = vzero();
            for (int d = 0; d < head_dim; d += LANES) sum = vfma(vload(query + g * head_dim + d), vload_kv(keys + p * step + d), sum);
            scores[g * padded + p] = vsum(sum);
        }
    for (int g = 0; g < HEADS; g++) soften(scores + g * padded, count, padded, partials[g]);
    int dim = 0;
    for (; dim + 4 * LANES <= head_dim; dim += 4 * LANES)
        weigh_values<T, HEADS, 4>(scores, padded, values + dim, step, count, partials, dim);
    for (; dim < head_dim; dim += LANES) weigh_values<T, HEADS, 1>(scores, padded, values + dim, step, count, partials, dim);
}

// One stretch of positions for the query heads of a KV head, three at a time (12 sums and their operands fit in 16 registers).
// `scores` is scratch: three times the count, rounded up to whole tiles.
template <class T>
inline void attend_stretch(const float* query, int heads, int head_dim, const T* keys, const T* values, int64_t step,
                           int64_t count, float* scores, const Partial* partials) {
    int g = 0;
    for (; g + 3 <= heads; g += 3) attend_heads<T, 3>(query + g * head_dim, head_dim, keys, values, step, count, scores, partials + g);
    if (heads - g == 2) attend_heads<T, 2>(query + g * head_dim, head_dim, keys, values, step, count, scores, partials + g);
    if (heads - g == 1) attend_heads<T, 1>(query + g * head_dim, head_dim, keys, values, step, count, scores, partials + g);
}

constexpr int KEYS = 64;  // positions between two updates of the running softmax

// Scratch of `attend_lanes`, in floats.
inline int64_t lanes_scratch(int head_dim) { return 2 * head_dim * TILE + KEYS * TILE + 2 * KEYS * head_dim; }

// `lanes` (up to 16) queries of one KV head, lane i seeing positions 0..last[i]. Each query
// is head_dim floats.
template <class T>
inline void attend_lanes(int lanes, const int64_t* last, int head_dim, const T* keys, const T* values, int64_t step,
                         float* scratch, const float* const* queries, const Target* targets) {
    float* q = scratch;                        // [head_dim][16]
    float* result = q + head_dim * TILE;       // [head_dim][16]
    float* weights = result + head_dim * TILE; // [KEYS][16]
    float* unpacked = weights + KEYS * TILE;   // [2][KEYS][head_dim], for bfloat16
    int64_t visible = 0;
    for (int i = 0; i < TILE; i++) {
        const float* row = queries[i < lanes ? i : 0];
        for (int d = 0; d < head_dim; d++) q[d * TILE + i] = row[d];
        if (i < lanes && last[i] + 1 > visible) visible = last[i] + 1;
    }
    for (int i = 0; i < head_dim * TILE; i++) result[i] = 0;
    alignas(64) float maximum[TILE], total[TILE];
    for (int i = 0; i < TILE; i++) maximum[i] = -1e30f, total[i] = 0;
    for (int64_t start = 0; start < visible; start += KEYS) {
        const int count = static_cast<int>(std::min<int64_t>(KEYS, visible - start));
        const float *k, *v;
        int64_t kv_step = step;
        if constexpr (sizeof(T) == 4) {
            k = keys + start * step;
            v = values + start * step;
        } else {
            kv_step = head_dim;
            for (int p = 0; p < count; p++)
                for (int d = 0; d < head_dim; d += LANES) {
                    vstore(unpacked + p * head_dim + d, vload_kv(keys + (start + p) * step + d));
                    vstore(unpacked + (KEYS + p) * head_dim + d, vload_kv(values + (start + p) * step + d));
                }
            k = unpacked;
            v = unpacked + KEYS * head_dim;
        }
        for (int i = 0; i < count * TILE; i++) weights[i] = 0;
        constexpr int STEP = SUBS == 1 ? 16 : 6;
        const float* panel = q;
        int p = 0;
        for (; p + STEP <= count; p += STEP) multiply_panels<STEP, 1>(&panel, head_dim, k + p * kv_step, 1, kv_step, weights + p * TILE);
        for (; p < count; p++) multiply_panels<1, 1>(&panel, head_dim, k + p * kv_step, 1, kv_step, weights + p * TILE);
        for (int i = 0; i < lanes; i++)  // what a lane must not see
            for (int64_t at = std::max<int64_t>(last[i] + 1 - start, 0); at < count; at++) weights[at * TILE + i] = -1e30f;
        for (int s = 0; s < SUBS; s++) {
            const int lane = s * LANES;
            const V before = vload(maximum + lane);
            V highest = before;
            for (int at = 0; at < count; at++) highest = vmax(highest, vload(weights + at * TILE + lane));
            const V shrink = vexp(before - highest);
            V sum = vload(total + lane) * shrink;
            for (int at = 0; at < count; at++) {
                const V weight = vexp(vload(weights + at * TILE + lane) - highest);
                vstore(weights + at * TILE + lane, weight);
                sum = sum + weight;
            }
            vstore(total + lane, sum);
            vstore(maximum + lane, highest);
            for (int d = 0; d < head_dim; d++) vstore(result + d * TILE + lane, vload(result + d * TILE + lane) * shrink);
        }
        panel = weights;
        int d = 0;
        for (; d + STEP <= head_dim; d += STEP) multiply_panels<STEP, 1>(&panel, count, v + d, kv_step, 1, result + d * TILE);
        for (; d < head_dim; d += 2) multiply_panels<2, 1>(&panel, count, v + d, kv_step, 1, result + d * TILE);
    }
    for (int i = 0; i < lanes; i++) {
        const Target& to = targets[i];
        for (int d = 0; d < head_dim; d++) to.data[d * to.step] = result[d * TILE + i] / total[i];
    }
}

}  // namespace
}  // namespace hp
