// Products of one interleaved tile of weights with a few, or with many, rows of activations, all in float32.
//
//   few rows (decode):   weights are decoded in registers and used at once for all rows; x is [column][row]
//   many rows (prefill): weights are decoded once into a panel of floats in the cache; x is [group][column][row of group]
#pragma once

#include <algorithm>
#include <utility>

#include "formats.h"

namespace hp {
namespace {

constexpr int FEW = 8;       // at most this many rows go through `few_rows`
constexpr int AHEAD = 8192;  // bytes between what is used and what is fetched from memory

#if defined(HP_AVX2)
constexpr int GROUP = 6, PANELS = 1;  // 12 accumulators of 16 registers
#elif defined(HP_PORTABLE)
constexpr int GROUP = 4, PANELS = 1;  // 16 of 32 (NEON)
#else
constexpr int GROUP = 12, PANELS = 2;  // 24 accumulators of 32 registers
#endif

HP_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// The hardware's own prefetching stops at each 4 KiB page.
template <class D>
HP_INLINE void prefetch_block(const uint8_t* block) {
#pragma GCC unroll 32
    for (int at = 0; at < D::BYTES; at += 64) prefetch(block + at + AHEAD);
}

// out[row][16] = tile · x. `sums[block][row]` holds the sum of x over each block of 32 columns.
// One or two rows: codes are summed by block and scaled once a block. More rows: values are decoded first, since that is
// shared by all rows. `CHAINS` independent sums hide the latency of the additions.
template <class D, int M>
inline void few_rows(const uint8_t* tile, int64_t blocks, const float* x, const float* sums, float* out) {
    constexpr int S = M <= 2 ? SUBS : 1;
    constexpr int CHAINS = M == 1 ? 4 : M <= 4 ? 2 : 1;
    for (int first = 0; first < SUBS; first += S) {
        V total[S][CHAINS][M];
        for (int s = 0; s < S; s++)
            for (int c = 0; c < CHAINS; c++)
                for (int m = 0; m < M; m++) total[s][c][m] = vzero();
        for (int64_t b = 0; b < blocks; b++) {
            const float* xb = x + b * BLOCK * M;
            if (first == 0) prefetch_block<D>(tile + b * D::BYTES);
#pragma GCC unroll 4
            for (int s = 0; s < S; s++) {
                if constexpr (D::SCALED && M <= 2) {
                    V part[CHAINS][M];
#pragma GCC unroll 8
                    for (int c = 0; c < CHAINS; c++)
                        for (int m = 0; m < M; m++) part[c][m] = vzero();
                    D::codes(tile, b, first + s, [&](V code, int k) __attribute__((always_inline)) {
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++)
                            part[k % CHAINS][m] = vfma(code, vset(xb[k * M + m]), part[k % CHAINS][m]);
                    });
                    const V scale = D::scale(tile, b, blocks, first + s);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        V sum = part[0][m];
#pragma GCC unroll 8
                        for (int c = 1; c < CHAINS; c++) sum = sum + part[c][m];
                        total[s][0][m] = vfma(scale, sum, total[s][0][m]);
                        if constexpr (D::HAS_MINIMUM)
                            total[s][0][m] = vfma(D::minimum(tile, b, blocks, first + s), vset(sums[b * M + m]), total[s][0][m]);
                    }
                } else {
                    const V scale = D::scale(tile, b, blocks, first + s), minimum = D::minimum(tile, b, blocks, first + s);
                    D::codes(tile, b, first + s, [&](V code, int k) __attribute__((always_inline)) {
                        const V w = D::SCALED ? vfma(code, scale, minimum) : code;
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++)
                            total[s][k % CHAINS][m] = vfma(w, vset(xb[k * M + m]), total[s][k % CHAINS][m]);
                    });
                }
            }
        }
        for (int s = 0; s < S; s++)
            for (int m = 0; m < M; m++) {
                V sum = total[s][0][m];
                for (int c = 1; c < CHAINS; c++) sum = sum + total[s][c][m];
                vstore(out + m * TILE + (first + s) * LANES, sum);
            }
    }
}

using FewRows = void (*)(const uint8_t*, int64_t, const float*, const float*, float*);

template <class D, int... M>
constexpr FewRows few_rows_of(int rows, std::integer_sequence<int, M...>) {
    constexpr FewRows table[] = {few_rows<D, M + 1>...};
    return table[rows - 1];
}

inline FewRows few_rows_for(int64_t format, int rows) {
    return with_decoder(format, [rows](auto d) { return few_rows_of<decltype(d)>(rows, std::make_integer_sequence<int, FEW>{}); });
}

// The exact values of a tile as floats, panel[column][16 rows].
inline void unpack(int64_t format, const uint8_t* tile, int64_t blocks, float* panel) {
    with_decoder(format, [=](auto d) {
        using D = decltype(d);
        for (int64_t b = 0; b < blocks; b++)
            for (int sub = 0; sub < SUBS; sub++) {
                const V scale = D::scale(tile, b, blocks, sub), minimum = D::minimum(tile, b, blocks, sub);
                float* to = panel + b * BLOCK * TILE + sub * LANES;
                D::codes(tile, b, sub, [=](V code, int k) __attribute__((always_inline)) {
                    vstore(to + k * TILE, D::SCALED ? vfma(code, scale, minimum) : code);
                });
            }
    });
}

// sum[row][panel·16 + lane] += Σ_k panel[k][lane] · x[k · x_step + row · x_row], for M rows and P panels.
// Never inlined: within a larger function its sums and pointers no longer fit the registers.
template <int M, int P>
__attribute__((noinline)) void multiply_panels(const float* const* panels, int64_t depth, const float* x, int64_t x_step, int64_t x_row, float* sum) {
    V acc[M][P][SUBS];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int s = 0; s < SUBS; s++) acc[m][p][s] = vload(sum + (m * P + p) * TILE + s * LANES);
    for (int64_t k = 0; k < depth; k++) {
        V w[P][SUBS];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int s = 0; s < SUBS; s++) w[p][s] = vload(panels[p] + k * TILE + s * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const V xv = vset(x[k * x_step + m * x_row]);
#pragma GCC unroll 2
            for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                for (int s = 0; s < SUBS; s++) acc[m][p][s] = vfma(w[p][s], xv, acc[m][p][s]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int s = 0; s < SUBS; s++) vstore(sum + (m * P + p) * TILE + s * LANES, acc[m][p][s]);
}

template <int P, int... M>
inline void multiply_group(int rows, const float* const* panels, int64_t depth, const float* x, float* sum, std::integer_sequence<int, M...>) {
    using F = void (*)(const float* const*, int64_t, const float*, int64_t, int64_t, float*);
    constexpr F table[] = {multiply_panels<M + 1, P>...};
    table[rows - 1](panels, depth, x, GROUP, 1, sum);
}

}  // namespace
}  // namespace hp
