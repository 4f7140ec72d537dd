// The products of amx.h: four sums at a time, of two row tiles with two weight tiles, or of one with four.
//
// Codes with scales: a block's sums must leave the unit, be scaled, and be added in float32. That is done for the step before the
// last, between the instructions of the next: the unit needs 16 cycles for a product, in which vectors add up three rows. So it never
// waits, and what it has summed is stored just before the register is used again:
//
//   step s     multiply ───────────────────────────► (four registers)
//   step s+1     store each to `taken` as its register is reused
//   step s+2       scale, add to the sums
#pragma once

#include <type_traits>

#include "amx.h"

#if HP_AMX

namespace hp {
namespace {

constexpr int64_t SUM_STEP = TOGETHER * TILE;  // sums are [row][TOGETHER][16]
constexpr int64_t ROOM = 2 * 2 * TOGETHER * 256;  // floats: two steps' sums, and as much for sums that nobody needs

// Where a step's sums go, and what they are scaled by.
struct Destination {
    float* sums[2];              // of each row tile, at its first weight tile
    const float* block_sums[2];  // of each row tile: sums of x over the block
    const __m512* scales;        // of the weight tiles, CHUNK apart
    const __m512* minima;
};

// Columns of a block: up to two row tiles, up to four weight tiles.
struct Step {
    const uint16_t* x[2];  // terms, UNIT apart
    const uint16_t* weights[4];
    Destination to;
};

// One vector of a step's sums. All that stays the same within a step is passed by value, so that it stays in registers.
template <bool MINIMUM>
HP_INLINE void add_vector(float* sum, const float* taken, __m512 scale, __m512 minimum, __m512 block_sum) {
    __m512 total = _mm512_fmadd_ps(scale, _mm512_load_ps(taken), _mm512_load_ps(sum));
    if constexpr (MINIMUM) total = _mm512_fmadd_ps(minimum, block_sum, total);
    _mm512_store_ps(sum, total);
}

// Rows [from, end) of a step's sums. WEIGHTS 2: rows 16-31 are the second row tile's.
template <int WEIGHTS, bool MINIMUM>
HP_INLINE void add_up(float* first, float* second, const float* block_sums, const float* more_block_sums, __m512 a, __m512 b, __m512 c, __m512 d,
                      __m512 min_a, __m512 min_b, __m512 min_c, __m512 min_d, const float* taken, int from, int end) {
#pragma GCC unroll 32
    for (int row = from; row < end; row++) {
        const int tile = row / 16, i = row % 16;
        const __m512 block_sum = MINIMUM ? _mm512_set1_ps((tile ? more_block_sums : block_sums)[i]) : _mm512_setzero_ps();
        float* sum = (tile ? second : first) + i * SUM_STEP;
        const float* at = taken + tile * WEIGHTS * 256 + i * TILE;
        add_vector<MINIMUM>(sum, at, a, min_a, block_sum);
        add_vector<MINIMUM>(sum + TILE, at + 256, b, min_b, block_sum);
        if constexpr (WEIGHTS == 4) {
            add_vector<MINIMUM>(sum + 2 * TILE, at + 512, c, min_c, block_sum);
            add_vector<MINIMUM>(sum + 3 * TILE, at + 768, d, min_d, block_sum);
        }
    }
}

// Products of codes, step after step, for one thread. WEIGHTS: tiles of weights in a step. ROWS of a row tile exist.
template <int WEIGHTS, int ROWS, bool MINIMUM>
class CodeProducts {
  public:
    // `room`, `nowhere`: 2048 floats each, which are overwritten.
    CodeProducts(float* room, float* nowhere) : room_(room) {
        const __m512* none = reinterpret_cast<const __m512*>(nowhere);
        const Destination dummy{{nowhere, nowhere}, {nowhere, nowhere}, none, none};
        before_ = last_ = dummy;
    }

    HP_INLINE void step(const Step& now) {
        float* store = room_ + (parity_ ^ 1) * 1024;
        const float* taken = room_ + parity_ * 1024;
        constexpr int ALL = ROWS * (4 / WEIGHTS), SLOTS = 12;
        const Destination to = before_;
        constexpr int C = WEIGHTS == 2 ? 0 : 2 * CHUNK, D = WEIGHTS == 2 ? 0 : 3 * CHUNK;
        float *first = to.sums[0], *second = to.sums[1];
        const float *block_sums = to.block_sums[0], *more_block_sums = to.block_sums[1];
        const __m512 a = to.scales[0], b = to.scales[CHUNK], c = to.scales[C], d = to.scales[D];
        const __m512 min_a = to.minima[0], min_b = to.minima[CHUNK], min_c = to.minima[C], min_d = to.minima[D];
#define HP_SLOT(N) add_up<WEIGHTS, MINIMUM>(first, second, block_sums, more_block_sums, a, b, c, d, min_a, min_b, min_c, min_d, taken, ALL * (N) / SLOTS, ALL * ((N) + 1) / SLOTS);
#define HP_RENEW(N)                             \
    _tile_stored(N, store + (N) * 256, 64); \
    _tile_zero(N);
        if constexpr (WEIGHTS == 2) {
            _tile_loadd(6, now.weights[0], 64);
            _tile_loadd(4, now.x[0], 64);
            HP_RENEW(0)
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, now.weights[1], 64);
            HP_SLOT(0)
            HP_RENEW(1)
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, now.x[1], 64);
            HP_SLOT(1)
            HP_RENEW(2)
            _tile_dpbf16ps(2, 5, 6);
            HP_SLOT(2)
            HP_RENEW(3)
            _tile_dpbf16ps(3, 5, 7);
#define HP_TERM(T, S)                              \
    _tile_loadd(4, now.x[0] + (T) * UNIT, 64);     \
    HP_SLOT(S)                                     \
    _tile_dpbf16ps(0, 4, 6);                       \
    _tile_loadd(5, now.x[1] + (T) * UNIT, 64);     \
    HP_SLOT((S) + 1)                               \
    _tile_dpbf16ps(1, 4, 7);                       \
    HP_SLOT((S) + 2)                               \
    _tile_dpbf16ps(2, 5, 6);                       \
    HP_SLOT((S) + 3)                               \
    _tile_dpbf16ps(3, 5, 7);
            HP_TERM(1, 3)
            HP_TERM(2, 7)
            HP_SLOT(11)
#undef HP_TERM
        } else {
            _tile_loadd(4, now.x[0], 64);
            _tile_loadd(5, now.weights[0], 64);
            HP_RENEW(0)
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, now.weights[1], 64);
            HP_SLOT(0)
            HP_RENEW(1)
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, now.weights[2], 64);
            HP_SLOT(1)
            HP_RENEW(2)
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, now.weights[3], 64);
            HP_SLOT(2)
            HP_RENEW(3)
            _tile_dpbf16ps(3, 4, 5);
#define HP_TERM(T, S)                          \
    _tile_loadd(4, now.x[0] + (T) * UNIT, 64); \
    _tile_loadd(6, now.weights[0], 64);        \
    HP_SLOT(S)                                 \
    _tile_dpbf16ps(0, 4, 6);                   \
    _tile_loadd(5, now.weights[1], 64);        \
    HP_SLOT((S) + 1)                           \
    _tile_dpbf16ps(1, 4, 5);                   \
    _tile_loadd(6, now.weights[2], 64);        \
    HP_SLOT((S) + 2)                           \
    _tile_dpbf16ps(2, 4, 6);                   \
    _tile_loadd(5, now.weights[3], 64);        \
    HP_SLOT((S) + 3)                           \
    _tile_dpbf16ps(3, 4, 5);
            HP_TERM(1, 3)
            HP_TERM(2, 7)
            HP_SLOT(11)
#undef HP_TERM
        }
#undef HP_RENEW
#undef HP_SLOT
        before_ = last_;
        last_ = now.to;
        parity_ ^= 1;
    }

    // What is still on its way arrives.
    void finish() {
        float* store = room_ + (parity_ ^ 1) * 1024;
        _tile_stored(0, store, 64);
        _tile_stored(1, store + 256, 64);
        _tile_stored(2, store + 512, 64);
        _tile_stored(3, store + 768, 64);
        rest(before_, room_ + parity_ * 1024);
        rest(last_, store);
    }

  private:
    static void rest(const Destination& to, const float* taken) {
        constexpr int ALL = ROWS * (4 / WEIGHTS), C = WEIGHTS == 2 ? 0 : 2 * CHUNK, D = WEIGHTS == 2 ? 0 : 3 * CHUNK;
        add_up<WEIGHTS, MINIMUM>(to.sums[0], to.sums[1], to.block_sums[0], to.block_sums[1], to.scales[0], to.scales[CHUNK], to.scales[C],
                                 to.scales[D], to.minima[0], to.minima[CHUNK], to.minima[C], to.minima[D], taken, 0, ALL);
    }

    float* room_;
    int parity_ = 0;
    Destination before_, last_;
};

// Values: sums stay in the unit for `count` blocks. X_TERMS of x with WEIGHT_TERMS of weights, without products of two small terms:
// two row tiles with two weight tiles, whose units are `first` and `second`, one a block. ADD: to what `sums` have.
template <int X_TERMS, int WEIGHT_TERMS, bool ADD>
inline void multiply_values_2x2(const uint16_t* const* first, const uint16_t* const* second, const uint16_t* const* x, int count,
                                float* const* sums) {
    if constexpr (ADD) {
        _tile_loadd(0, sums[0], SUM_STEP * 4);
        _tile_loadd(1, sums[0] + TILE, SUM_STEP * 4);
        _tile_loadd(2, sums[1], SUM_STEP * 4);
        _tile_loadd(3, sums[1] + TILE, SUM_STEP * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int b = 0; b < count; b++)
#pragma GCC unroll 3
        for (int w = 0; w < WEIGHT_TERMS; w++) {
            _tile_loadd(6, first[b] + w * UNIT, 64);
            _tile_loadd(7, second[b] + w * UNIT, 64);
#pragma GCC unroll 3
            for (int t = 0; t < X_TERMS - w; t++) {
                _tile_loadd(4, x[0] + (b * X_TERMS + t) * UNIT, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, x[1] + (b * X_TERMS + t) * UNIT, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    _tile_stored(0, sums[0], SUM_STEP * 4);
    _tile_stored(1, sums[0] + TILE, SUM_STEP * 4);
    _tile_stored(2, sums[1], SUM_STEP * 4);
    _tile_stored(3, sums[1] + TILE, SUM_STEP * 4);
}

// The same for one row tile with the four weight tiles of a panel.
template <int X_TERMS, int WEIGHT_TERMS>
inline void multiply_values_1x4(const Pointers& panel, int count, const uint16_t* x, float* sums) {
    _tile_loadd(0, sums, SUM_STEP * 4);
    _tile_loadd(1, sums + TILE, SUM_STEP * 4);
    _tile_loadd(2, sums + 2 * TILE, SUM_STEP * 4);
    _tile_loadd(3, sums + 3 * TILE, SUM_STEP * 4);
    for (int b = 0; b < count; b++)
#pragma GCC unroll 3
        for (int w = 0; w < WEIGHT_TERMS; w++)
#pragma GCC unroll 3
            for (int t = 0; t < X_TERMS - w; t++) {
                _tile_loadd(4, x + (b * X_TERMS + t) * UNIT, 64);
                _tile_loadd(6, panel.at[0][b] + w * UNIT, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, panel.at[1][b] + w * UNIT, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(6, panel.at[2][b] + w * UNIT, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, panel.at[3][b] + w * UNIT, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
    _tile_stored(0, sums, SUM_STEP * 4);
    _tile_stored(1, sums + TILE, SUM_STEP * 4);
    _tile_stored(2, sums + 2 * TILE, SUM_STEP * 4);
    _tile_stored(3, sums + 3 * TILE, SUM_STEP * 4);
}

// Row tiles that meet a panel: terms and sums of the first at the panel's first block; the next is `blocks` blocks on.
struct RowTiles {
    const uint16_t* x;
    const float* block_sums;
    int64_t blocks, count;
};

template <int X_TERMS, int WEIGHT_TERMS>
inline void multiply_panel_values(const Panel& panel, int weights, int blocks, const RowTiles& rows, float* sums) {
    const int64_t row_tile = rows.blocks * X_TERMS * UNIT;
    int64_t tile = 0;
    for (; tile + 2 <= rows.count; tile += 2) {
        const uint16_t* x[2] = {rows.x + tile * row_tile, rows.x + (tile + 1) * row_tile};
        for (int n = 0; n < weights; n += 2) {
            float* at[2] = {sums + tile * 16 * SUM_STEP + n * TILE, sums + (tile + 1) * 16 * SUM_STEP + n * TILE};
            multiply_values_2x2<X_TERMS, WEIGHT_TERMS, true>(panel.at[n], panel.at[n + 1], x, blocks, at);
        }
    }
    if (tile < rows.count) multiply_values_1x4<X_TERMS, WEIGHT_TERMS>(panel, blocks, rows.x + tile * row_tile, sums + tile * 16 * SUM_STEP);
}

// A chunk of a panel with row tiles, 4 / WEIGHTS at a time; of an odd last one the second's sums go nowhere.
template <int WEIGHTS, int ROWS, bool MINIMUM>
inline void multiply_chunk(CodeProducts<WEIGHTS, ROWS, MINIMUM>& products, const Panel& panel, int weights, int blocks, const RowTiles& rows,
                           float* nowhere, float* sums) {
    constexpr int TILES = 4 / WEIGHTS;
    for (int64_t tile = 0; tile < rows.count; tile += TILES)
        for (int n = 0; n < weights; n += WEIGHTS)
            for (int b = 0; b < blocks; b++) {
                Step step;
                for (int i = 0; i < TILES; i++) {
                    const bool real = tile + i < rows.count;
                    const int64_t block = (real ? tile + i : tile) * rows.blocks + b;
                    step.x[i] = rows.x + block * TERMS * UNIT;
                    step.to.sums[i] = real ? sums + (tile + i) * 16 * SUM_STEP + n * TILE : nowhere;
                    step.to.block_sums[i] = rows.block_sums + block * 16;
                }
                for (int i = 0; i < WEIGHTS; i++) step.weights[i] = panel.at[n + i][b];
                step.to.scales = &panel.scales[panel.turn][n][b];
                step.to.minima = &panel.minima[panel.turn][n][b];
                products.step(step);
            }
}

// All chunks of a panel, by codes, without a pause: sums of a chunk arrive while the next is multiplied. A chunk has at least two
// steps, or is the last, so that the scales of two chunks are all that is needed at once.
template <int WEIGHTS, int ROWS, bool MINIMUM, class Fill>
inline void multiply_codes(const Panel& panel, int weights, int64_t blocks, float* room, float* sums, Fill&& fill) {
    float* nowhere = room + ROOM / 2;
    CodeProducts<WEIGHTS, ROWS, MINIMUM> products(room, nowhere);
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        const int here = static_cast<int>(std::min<int64_t>(CHUNK, blocks - b));
        multiply_chunk(products, panel, weights, here, fill(b, here), nowhere, sums);
    }
    products.finish();
}

// sums[row][TOGETHER][16] += rows · panel, for the first `weights` of its tiles and all blocks of columns. fill(block, count) readies
// a chunk of the panel and gives the row tiles that meet it, `row_tiles` of them, each of `rows` rows. `room`: ROOM floats, overwritten.
template <class Fill>
inline void multiply_panel(const Panel& panel, int weights, int64_t blocks, int64_t row_tiles, int rows, float* room, float* sums,
                           Fill&& fill) {
    if (panel.scaled()) {
        const auto codes = [&](auto minimum) {
            constexpr bool MINIMUM = decltype(minimum)::value;
            if (row_tiles > 1) multiply_codes<2, 16, MINIMUM>(panel, weights, blocks, room, sums, fill);
            else if (rows == 16) multiply_codes<4, 16, MINIMUM>(panel, weights, blocks, room, sums, fill);
            else multiply_codes<4, 8, MINIMUM>(panel, weights, blocks, room, sums, fill);
        };
        return panel.format == Q4 ? codes(std::true_type{}) : codes(std::false_type{});
    }
    const int64_t chunk = panel.chunk();
    for (int64_t b = 0; b < blocks; b += chunk) {
        const int here = static_cast<int>(std::min(chunk, blocks - b));
        const RowTiles met = fill(b, here);
        if (panel.kind == Panel::Kind::ROUNDED) multiply_panel_values<1, 1>(panel, weights, here, met, sums);
        else if (panel.kind == Panel::Kind::VALUES) multiply_panel_values<TERMS, TERMS>(panel, weights, here, met, sums);
        else multiply_panel_values<TERMS, 1>(panel, weights, here, met, sums);
    }
}

}  // namespace
}  // namespace hp

#endif
