// Products of packed matrices with rows of activations, shared among the threads of a team.
//
// Which kernel runs depends on the number of rows, the format and the machine, and on nothing else, so that results repeat:
//
//   up to 8 rows     integers (digits.h) where they are exact and quick, else floats decoded in registers (kernels.h)
//   5 to 8, codes    the matrix unit (amx.h) where there is one, for exact products
//   more             the matrix unit, else floats unpacked into cache panels (kernels.h)
//
// Each thread has a fixed range of weight tiles, which it streams once.
#pragma once

#include <memory>
#include <vector>

#include "amx_products.h"
#include "digits.h"
#include "pool.h"

namespace hp {
namespace {

// Activations as products read them: groups of `group` rows, [group][column][row of group]; a group of one is a plain row.
struct Grouped {
    float* data;
    int64_t columns;
    int group;
    float* column(int64_t row, int64_t column) const { return data + (row / group * columns + column) * group + row % group; }
};

// A tile of a matrix.
struct Place {
    const Matrix* matrix;
    int64_t tile;
};

#if HP_AMX
// Activations as the matrix unit reads them.
struct Terms {
    Aligned<uint16_t> values;
    Floats sums;
    void reserve(int64_t row_tiles, int64_t columns) {
        const auto size = static_cast<size_t>(row_tiles * (columns / BLOCK) * TERMS * UNIT);
        if (values.size() >= size) return;
        values.resize(size);
        sums.resize(static_cast<size_t>(row_tiles * (columns / BLOCK) * 16));
    }
};
#endif

class Multiplier {
  public:
    // `widest`: most columns of a matrix. `narrow`: activations may be rounded to 8 bits, to bfloat16 on the matrix unit.
    Multiplier(Team& team, int64_t widest, bool narrow) : team_(team), widest_(widest), narrow_(narrow), own_(static_cast<size_t>(team.size())) {
        constexpr int digits = std::max(FEW, EXACT_DIGITS * EXACT_ROWS);
        for (Own& own : own_) {
            own.few.resize(static_cast<size_t>(widest * FEW));
            own.sums.resize(static_cast<size_t>(widest / BLOCK * FEW));
            own.panels.resize(static_cast<size_t>(2 * TILE * widest));
            own.digits.resize(static_cast<size_t>(widest * digits));
            own.scales.resize(static_cast<size_t>(2 * widest / BLOCK * FEW));
            own.bias.resize(static_cast<size_t>(widest / BLOCK * digits));
#if HP_AMX
            own.panel.reset(new Panel);
            own.terms.reserve(1, widest);
            own.products.resize(static_cast<size_t>(MOST_BLOCKS * 16 * SUM_STEP));
            own.room.resize(static_cast<size_t>(ROOM));
#endif
        }
    }

    // Memory for so many rows; not to be called within a step.
    void reserve(int64_t rows) {
#if HP_AMX
        terms_.reserve((rows + 15) / 16, widest_);
#else
        (void)rows;
#endif
    }

    // How many rows the product with a matrix wants in a group.
    int group_of(int64_t rows, const Matrix& reader) const {
        if (on_matrix_unit(rows, reader)) return 1;
        return rows <= FEW ? static_cast<int>(rows) : GROUP;
    }

    // A thread's own room for up to FEW rows of the widest.
    float* few(int thread) { return own_[static_cast<size_t>(thread)].few.data(); }

    // Sums of each block of columns, which products with up to FEW rows want.
    void block_sums(int thread, const Grouped& x, int64_t rows) {
        if (x.group != rows || rows > FEW) return;
        float* sums = own_[static_cast<size_t>(thread)].sums.data();
        for (int64_t b = 0; b < x.columns / BLOCK; b++) {
            const float* block = x.data + b * BLOCK * rows;
            if (rows == 1) {
                V sum = vload(block);
                for (int k = LANES; k < BLOCK; k += LANES) sum = sum + vload(block + k);
                sums[b] = vsum(sum);
                continue;
            }
            float sum[FEW] = {};
            for (int k = 0; k < BLOCK; k++)
                for (int64_t m = 0; m < rows; m++) sum[m] += block[k * rows + m];
            std::copy(sum, sum + rows, sums + b * rows);
        }
    }

    // The tiles of [0, units) that are this thread's, whole multiples of `grain`, two at a time. at(unit) is the Place of a tile;
    // emit(unit, row, rows, a, b, stride) takes the products: a[i · stride + lane] of activation row + i with row `lane` of tile `unit`,
    // b those of the next tile, null when there is none.
    template <class At, class Emit>
    void run(int thread, int64_t rows, const Grouped& x, int64_t units, int64_t grain, At&& at, Emit&& emit) {
        const int64_t begin = from(units / grain, thread) * grain, end = from(units / grain, thread + 1) * grain;
#if HP_AMX
        if (x.group == 1 && rows >= LEAST_ROWS) return products_on_matrix_unit(thread, rows, x, begin, end, at, emit);
#endif
        if (rows <= FEW) products_of_few(thread, static_cast<int>(rows), x, begin, end, at, emit);
        else products_of_many(thread, rows, x, begin, end, at, emit);
    }

  private:
    struct Own {  // one thread's scratch
        Floats few, sums, panels, scales;
        std::vector<int8_t> digits;
        std::vector<int32_t> bias;
#if HP_AMX
        std::unique_ptr<Panel> panel;
        Terms terms;
        Aligned<float> products, room;
#endif
    };

    int64_t from(int64_t units, int thread) const { return share(units, thread, team_.size()); }

    template <class At, class Emit>
    void products_of_few(int thread, int rows, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t blocks = x.columns / BLOCK;
        const Digits digits{own.digits.data(), own.scales.data(), narrow_ ? own.scales.data() + blocks * rows : own.sums.data(), own.bias.data()};
        int64_t prepared = -1;  // format whose order of columns the digits are in
        alignas(64) float out[2 * FEW * TILE];
        const auto one = [&](const Place& place, float* to) {
            const int64_t format = place.matrix->format;
            const uint8_t* tile = place.matrix->tile(place.tile);
            const DigitKernel kernel = digit_kernel(format, rows, narrow_);
            if (!kernel.multiply) return few_rows_for(format, rows)(tile, blocks, x.data, own.sums.data(), to);
            if (prepared != format) kernel.prepare(x.data, x.columns, rows, digits);
            prepared = format;
            kernel.multiply(tile, blocks, digits, to);
        };
        for (int64_t unit = begin; unit < end; unit += 2) {
            const bool two = unit + 1 < end;
            one(at(unit), out);
            if (two) one(at(unit + 1), out + rows * TILE);
            emit(unit, 0, rows, out, two ? out + rows * TILE : nullptr, TILE);
        }
    }

    template <class At, class Emit>
    void products_of_many(int thread, int64_t rows, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t blocks = x.columns / BLOCK;
        float* panels[2] = {own.panels.data(), own.panels.data() + x.columns * TILE};
        const auto all = std::make_integer_sequence<int, GROUP>{};
        alignas(64) float out[2 * GROUP * TILE];
        for (int64_t unit = begin; unit < end; unit += 2) {
            const bool two = unit + 1 < end;
            for (int i = 0; i < (two ? 2 : 1); i++) {
                const Place place = at(unit + i);
                unpack(place.matrix->format, place.matrix->tile(place.tile), blocks, panels[i]);
            }
            for (int64_t row = 0; row < rows; row += GROUP) {
                const int m = static_cast<int>(std::min<int64_t>(GROUP, rows - row));
                const float* group = x.data + row * x.columns;
                std::fill(out, out + 2 * m * TILE, 0.0f);
                if (PANELS == 2 && two) {
                    multiply_group<2>(m, panels, x.columns, group, out, all);
                    emit(unit, row, m, out, out + TILE, 2 * TILE);
                } else {
                    multiply_group<1>(m, panels, x.columns, group, out, all);
                    if (two) multiply_group<1>(m, panels + 1, x.columns, group, out + m * TILE, all);
                    emit(unit, row, m, out, two ? out + m * TILE : nullptr, TILE);
                }
            }
        }
    }

#if HP_AMX
    // Few rows only for exact products with codes; with values, and with 8-bit activations, vectors are as quick (measured at 8 rows).
    bool on_matrix_unit(int64_t rows, const Matrix& m) const {
        return (rows > FEW || (rows >= LEAST_ROWS && (m.format == Q4 || m.format == Q8) && !narrow_)) && amx_allowed();
    }

    template <class At, class Emit>
    void products_on_matrix_unit(int thread, int64_t rows, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t row_tiles = (rows + 15) / 16, blocks = x.columns / BLOCK;
        const bool shared = row_tiles > 1;  // a single tile of rows each thread splits for itself
        Terms& terms = shared ? terms_ : own.terms;
        const int64_t first_tile = shared ? from(row_tiles, thread) : 0, last_tile = shared ? from(row_tiles, thread + 1) : 1;
        (narrow_ ? split_rows<1> : split_rows<TERMS>)(x.data, rows, x.columns, first_tile, last_tile, terms.values.data(), terms.sums.data());
        if (shared) team_.barrier();
        const int64_t fitting = std::clamp<int64_t>((narrow_ ? TERMS : 1) * MOST_BLOCKS / blocks / 2 * 2, LEAST_TILES, MOST_BLOCKS);
        const int64_t turns = (row_tiles + fitting - 1) / fitting, step = ((row_tiles + turns - 1) / turns + 1) / 2 * 2;  // equal, whole pairs
        for (int64_t first = 0; first < row_tiles; first += step)
            for (int64_t unit = begin; unit < end; unit += TOGETHER)
                products_of_panel(own, rows, blocks, terms, first, std::min(step, row_tiles - first), unit,
                                  static_cast<int>(std::min<int64_t>(TOGETHER, end - unit)), at, emit);
        if (shared) team_.barrier();  // the terms are written anew for the next product
    }

    // `count` tiles from `unit` on, with row tiles [first, first + row_tiles).
    template <class At, class Emit>
    void products_of_panel(Own& own, int64_t rows, int64_t blocks, const Terms& terms, int64_t first, int64_t row_tiles, int64_t unit,
                           int count, At&& at, Emit&& emit) {
        const Matrix* matrices[TOGETHER];
        const uint8_t* tiles[TOGETHER];
        for (int i = 0; i < count; i++) {
            const Place place = at(unit + i);
            matrices[i] = place.matrix;
            tiles[i] = place.matrix->tile(place.tile);
        }
        Panel& panel = *own.panel;
        panel.choose(matrices, count, narrow_);
        const int64_t kept = narrow_ ? 1 : TERMS;
        float* sums = own.products.data();
        std::fill(sums, sums + row_tiles * 16 * SUM_STEP, 0.0f);
        multiply_panel(panel, count, blocks, row_tiles, rows_for(rows), own.room.data(), sums,
                       [&](int64_t b, int here) {
                           panel.fill(matrices, tiles, count, b, here);
                           const int64_t block = first * blocks + b;
                           return RowTiles{terms.values.data() + block * kept * UNIT, terms.sums.data() + block * 16, blocks, row_tiles};
                       });
        const int64_t row = first * 16;
        for (int i = 0; i < count; i += 2)
            emit(unit + i, row, static_cast<int>(std::min(row_tiles * 16, rows - row)), sums + i * TILE,
                 i + 1 < count ? sums + (i + 1) * TILE : nullptr, static_cast<int>(SUM_STEP));
    }
#else
    static bool on_matrix_unit(int64_t, const Matrix&) { return false; }
#endif

    Team& team_;
    const int64_t widest_;
    const bool narrow_;
    std::vector<Own> own_;
#if HP_AMX
    Terms terms_;
#endif
};

}  // namespace
}  // namespace hp
